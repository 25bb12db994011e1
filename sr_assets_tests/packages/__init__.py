"""Tests of the packages that `make deb` and `make rpm` build; `make test-packages` runs them.

They need root, Debian's packages, and minutes of an idle machine, so that `make test` and `make check` leave them out.
"""
