"""The conformance kit: proves a backend with one command, without a test being written.

``weightwire conformance NAME`` and ``pytest --pyargs weightwire_conformance
--weightwire-backend NAME`` run every scenario with real processes and report one
of five outcomes for each; see ``weightwire_conformance.outcomes``.
"""

__all__: list[str] = []
