"""What is declared is true."""

from __future__ import annotations

from weightwire_conformance.rig import Fleet
from weightwire_conformance.scenario import scenario

__all__: list[str] = []


@scenario
def capabilities_agree_with_each_other(fleet: Fleet) -> None:
    """A flow has consequences; limits are limits; a declared device can be used."""
    declared = fleet.capabilities
    stores = declared["flow"] == "store"
    assert declared["serves_finished"] == stores, "stored versions are served, others can't be"
    assert declared["needs_live_receivers"] != stores, "what is stored needs nobody to listen"
    assert not stores or declared["default_wait"] == "published", "who stores waits for nobody"
    assert declared["devices"], "no device at all"
    for limit in ("max_receivers", "max_tensor_nbytes"):
        assert declared[limit] is None or declared[limit] > 0, f"{limit}={declared[limit]}"
    fleet.exchange(fleet.sender(), 1, fleet.receiver())


@scenario
def unknown_options_are_refused(fleet: Fleet) -> None:
    choice = {"backend": fleet.backend, **fleet.options, "no_such_option": 1}
    error = fleet.worker().start("select", backend=choice).error()
    assert "ConfigError" in error.kinds, error
    assert "no_such_option" in error.first, error
