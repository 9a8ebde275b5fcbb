"""What runs on GPU hosts: observing, releases, the gate, activations and their journal. Standard library only.

The same files serve three places: Ansible modules import them as ``ansible.module_utils.ddtree``, every host keeps a
copy as its *agent* (``<root>/agent/<version>/ddtree``), and the control node imports them as ``ddtree``.
"""
