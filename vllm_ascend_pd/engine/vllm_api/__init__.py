# SPDX-License-Identifier: Apache-2.0
"""What this package reads and writes of vLLM's objects, and where its versions differ.

A class of ``types`` and ``config_types`` declares the attributes of vLLM's class that are used, and
all of ``engine`` is annotated with these classes, so mypy finds what is not declared. A function
names in its docstring what it touches beside that, as ``path:name`` of vLLM's source; a class'
attribute is ``path:Class.attribute``, and ``|`` stands between what one version or another has.
``tools/apply_patches.py check`` looks for each of these names, and for all that is imported of
vLLM, in the source of every supported version.
"""
