"""Tests of the packages that `make deb` and `make rpm` build; `make test-packages` runs them.

They need minutes, root and Debian's packages, so that `make test` and `make check` leave them out.
"""
