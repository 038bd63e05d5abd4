"""`python -m tests.plugins.conformance.mistakes.report` prints what the kit says of each deliberate mistake."""

from __future__ import annotations

import sys
import textwrap

from tests.plugins.conformance.mistakes import test_mutants


def main() -> None:
    """Run every mutant through the test that is to find it."""
    cases = [*test_mutants.MUTANTS]
    cases += [(mutant, "CommBackendTests", test, message) for mutant, test, message in test_mutants.BACKENDS]
    found = 0
    for mutant, kit, test, _ in cases:
        failure = test_mutants.failure_of(kit, test, mutant())
        found += bool(failure)
        print(f"{mutant.name} ({(mutant.__doc__ or '').strip()})\n  {kit}.{test}")
        print(textwrap.indent(textwrap.shorten(failure or "PASSED", 400), "  "))
    print(f"{found} of {len(cases)} found")
    sys.exit(found != len(cases))


if __name__ == "__main__":
    main()
