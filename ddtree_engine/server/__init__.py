"""The standalone server: an OpenAI-compatible endpoint over `ddtree_engine.reference`.

Run it as `python -m ddtree_engine.server --model embedded --draft embedded --served-model-name demo-code --port 30001`.
"""
