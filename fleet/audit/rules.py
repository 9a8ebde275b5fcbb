"""The audit's rules, as data: what is wrong, why it matters, how to mend it.

The order is that in which to mend: a wrong interpreter or set of packages is the cause of most that follows, so missing
symbols and libraries come after. In `fix`, words in braces stand for what was found. `source` names the row of the
project's history (H1 to H15) or the kind of public report that the rule comes from. What the audit has in common with
preflight (driver, toolkit, C library) is reported under preflight's rules.
"""

from __future__ import annotations

from fleet import content

content.add_host_code()

from ddtree import rules as preflight  # noqa: E402
from ddtree.rules import ERROR, WARNING, Rule  # noqa: E402

NOTE = "note"
SEVERITIES = (ERROR, WARNING, NOTE)


def _rule(
    rule_id: str,
    severity: str,
    stage: str,
    title: str,
    explanation: str,
    fix: str,
    source: str = "",
    waivable: bool = True,
) -> Rule:
    return Rule(rule_id, severity, stage, title, explanation, fix, waivable, source)


_ALL: tuple[Rule, ...] = (
    # -- what it is -------------------------------------------------------------------------------------------------
    _rule(
        "SET-PYTHON",
        ERROR,
        "set",
        "the environment is of another Python version than the stack",
        "Compiled wheels fit one minor version of Python.",
        "make the environment with Python {needed}",
        "H6",
        waivable=False,
    ),
    _rule(
        "SET-TAGS",
        ERROR,
        "set",
        "a wheel was made for another interpreter or machine",
        "Its tags do not fit this Python, processor or C library, so its compiled code cannot be loaded.",
        "replace it by the wheel for {needed}",
        "R1, R4",
    ),
    _rule(
        "SET-METADATA",
        ERROR,
        "set",
        "a distribution cannot be read",
        "Nobody can say what it is, or whether its files are whole.",
        "install {name} again from the lock's wheel",
        "truncated or half-copied package",
    ),
    _rule(
        "SET-TWICE",
        ERROR,
        "set",
        "a distribution is installed twice",
        "Two versions lie over each other; which files are left is chance.",
        "remove the environment and install it again; never install over a live one",
        "H9",
    ),
    _rule(
        "SET-MISSING",
        ERROR,
        "set",
        "a distribution of the lock is not installed",
        "Something will import it, sooner or later.",
        "install {name} {needed} from the stack's lock, or make the environment again",
        "H8, R3",
    ),
    _rule(
        "SET-VERSION",
        ERROR,
        "set",
        "a distribution has another version than the lock",
        "The stack was matched as a whole; a part from elsewhere fits by chance only.",
        "install {name} {needed} from the stack's lock",
        "H6, R5",
    ),
    _rule(
        "SET-EXTRA",
        ERROR,
        "set",
        "a distribution is installed that the lock does not name",
        "It may shadow modules or pull in other libraries; the environment is not the one that was proven.",
        "remove {name}, or lock it in the stack",
        "H9, R5",
    ),
    _rule(
        "SET-REQUIREMENT",
        ERROR,
        "set",
        "what a distribution requires is not there",
        "Its own metadata asks for a distribution, or for a version of it, that is not installed.",
        "install {needed}",
        "H4, H8, R7",
    ),
    _rule(
        "SET-CONFLICT",
        ERROR,
        "set",
        "two distributions bring the same module",
        "The one that was installed last has overwritten files of the other; what is left belongs to neither.",
        "keep {keep} only, and install it again afterwards",
        "H4",
    ),
    # -- one CUDA ---------------------------------------------------------------------------------------------------
    _rule(
        "TORCH-BUILD",
        ERROR,
        "cuda",
        "torch is another build than the stack's",
        "Kernels are compiled against one build of torch; its local tag (+cu130, +cpu) is part of its version.",
        "install torch {needed} from the stack's lock",
        "H3, H6, R4",
        waivable=False,
    ),
    _rule(
        "CUDA-MIXED",
        ERROR,
        "cuda",
        "builds for another CUDA major are installed",
        "Libraries of two CUDA majors in one process do not share a context, and one of them lacks its runtime.",
        "replace {name} by the build for CUDA {needed}",
        "H3, R6",
    ),
    _rule(
        "CUDA-LIBRARY",
        ERROR,
        "cuda",
        "a library is linked against another CUDA major",
        "It cannot be loaded here; LD_LIBRARY_PATH only moves the failure.",
        "replace {name} by a build for CUDA {needed}",
        "H3, I11",
    ),
    _rule(
        "CUDA-TOOLCHAIN",
        ERROR,
        "cuda",
        "the compiler's parts are of different CUDA releases",
        "nvcc, nvvm, crt and the runtime headers work together within one release only; kernels would not compile.",
        "lock all of {name} at one CUDA release",
        "H5",
    ),
    # -- ABI --------------------------------------------------------------------------------------------------------
    _rule(
        "ABI-TIE",
        ERROR,
        "abi",
        "the kernels were built for another torch",
        "The wheel declares no dependency on torch, so no resolver can see that it fits one build only.",
        "install torch {needed}, or the kernels built for torch {found}",
        "H3, R2",
    ),
    _rule(
        "ABI-SYMBOLS",
        ERROR,
        "abi",
        "an extension needs symbols that the installed torch does not export",
        "It was compiled against another torch. Importing it fails with 'undefined symbol', which is often swallowed.",
        "install the build of {name} for torch {torch}, or the torch that it was built for",
        "H3, R2, I10",
    ),
    _rule(
        "ABI-UNTIED",
        WARNING,
        "abi",
        "nobody has recorded which torch this kernel build is for",
        "Its symbols fit, but the tie between this build and one torch is not among those on record.",
        "add its sha256 and its torch to the stack's ties when it is proven",
        "R2",
    ),
    # -- libraries --------------------------------------------------------------------------------------------------
    _rule(
        "LIB-DAMAGED",
        ERROR,
        "libraries",
        "a library cannot be read",
        "It is cut off or damaged, or no library at all.",
        "install {name} again from the lock's wheel",
        "half-copied package",
    ),
    _rule(
        "LIB-MISSING",
        ERROR,
        "libraries",
        "a needed library is nowhere",
        "Neither the environment nor the system's own libraries hold it; loading fails.",
        "install {needed}",
        "H7, I11, I13",
    ),
    _rule(
        "LIB-SYSTEM",
        ERROR,
        "libraries",
        "a library of the system is needed that hosts need not have",
        "The stack does not list it, so no preflight asks hosts for it.",
        "add {needed} to `libraries` in stack.yml (Debian: {package})",
        "I9",
    ),
    _rule(
        "LIB-VERSION",
        ERROR,
        "libraries",
        "a library is too old for one that needs it",
        "It is there, but lacks the symbol versions that the other one was linked with.",
        "install the matching version of {needed}",
        "undefined symbol, version libnvJitLink.so",
    ),
    # -- GPU --------------------------------------------------------------------------------------------------------
    _rule(
        "ARCH-UNCOVERED",
        ERROR,
        "arch",
        "kernels do not cover a GPU architecture",
        "Neither code for this architecture nor PTX that could be compiled for it: 'no kernel image' at the first use.",
        "use a build of {name} with code for {needed}, or other GPUs",
        "H3, G22, G23",
    ),
    # -- files ------------------------------------------------------------------------------------------------------
    _rule(
        "FILE-ESCAPES",
        ERROR,
        "files",
        "a distribution claims files outside the environment",
        "Installing or removing it would touch what is not its own. Nothing there was read.",
        "do not use this wheel of {name}; report it",
        "hostile wheel",
        waivable=False,
    ),
    _rule(
        "FILE-EDITED",
        ERROR,
        "files",
        "files differ from what their distribution installed",
        "Somebody edited them, another package overwrote them, or the disk damaged them.",
        "install {name} again from the lock's wheel; put changes into the stack's patches",
        "H9, H10",
    ),
    _rule(
        "FILE-MISSING",
        ERROR,
        "files",
        "files of a distribution are gone",
        "The copy was partial, or something removed them.",
        "install {name} again from the lock's wheel",
        "H8, H10",
    ),
    _rule(
        "FILE-UNOWNED",
        WARNING,
        "files",
        "files that no distribution brought",
        "Copied there by hand or left behind; they can be imported, and nobody can say what they are.",
        "remove them, or package them and lock the package",
        "H10",
    ),
)

RULES: dict[str, Rule] = {rule.id: rule for rule in _ALL}
for _shared in ("HOST-GLIBC", "HOST-LIBRARY", "DRIVER-OLD", "GPU-TOOLKIT"):
    RULES[_shared] = preflight.RULES[_shared]
ORDER = {rule_id: position for position, rule_id in enumerate(RULES)}
