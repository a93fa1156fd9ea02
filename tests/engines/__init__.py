"""Our plug-ins in the engines' own load-balancing code, on CPU ranks: `make test-engines`, not part of `make test`."""
