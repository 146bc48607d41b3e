"""The subcommands of ``tio``, one file each: they read arguments, call ``verify`` and print. Nothing is computed here.

A command is a function that returns what it found, decorated with :func:`tio_megatron.commands.answer.command`; ``cli.py`` lists the modules.
"""
