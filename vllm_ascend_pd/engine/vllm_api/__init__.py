# SPDX-License-Identifier: Apache-2.0
"""What this package reads and writes of vLLM's objects, and where its versions differ.

Each function names in its docstring what it touches, as ``path:name`` of vLLM's source: a class'
attribute is ``path:Class.attribute``. ``|`` stands between what one version or another has.
``tools/apply_patches.py check`` looks for each of these names, and for all that ``engine`` imports
of vLLM, in the source of every supported version.
"""
