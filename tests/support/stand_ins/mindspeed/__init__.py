"""A stand-in for MindSpeed in tests: the public behaviour of its patch manager and of ``repatch``, written for this repository.

MindSpeed itself is not in CI. What is relied on is written down in ``tio_megatron/integrations/mindspeed/manager.py``; this package behaves
like that, including what is awkward about it (aliases in modules named after it are rewritten and not given back; a missing symbol is made
up), and has three features that patch megatron-core the way MindSpeed's do. The same cases run against the real sources with
``make test-mindspeed``. No line of it is MindSpeed's.
"""
