"""The library is broken, in every process that opens such a backend.

What core promises whatever the transport is needs culprits, too: these are mutants of
core over the reference backend, or over files where that promise is about stored versions.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

import weightwire.lifecycle.history
import weightwire.mixing
import weightwire.snapshot
import weightwire.staging
import weightwire.table
import weightwire.targets
import weightwire.trainer_rank
from weightwire.copying import copy_all
from weightwire.deadline import Deadline
from weightwire.errors import VerificationError
from weightwire.lifecycle.receiver import ReceiverMachine
from weightwire.lifecycle.sender import SenderMachine
from weightwire.pipeline import FetchPlan
from weightwire.receiver import WeightReceiver
from weightwire.session import keys
from weightwire.session.session import Session
from weightwire.tables import build_table
from weightwire.targets import MappingTarget
from weightwire_broken import BrokenFilesystem, BrokenMemory, broken


class Spoils:
    """Spoils the library once a process, before it opens anything."""

    spoilt = False

    def spoil(self):
        raise NotImplementedError

    def _once(self):
        if not type(self).spoilt:
            type(self).spoilt = True
            self.spoil()

    def open_sender(self, context):
        self._once()
        return super().open_sender(context)

    def open_receiver(self, context):
        self._once()
        return super().open_receiver(context)


# ------------------------------------------------------------------ tensors


@broken
class CopiesAsItLies(Spoils, BrokenMemory):
    """Transposed tensors are staged in the order of their memory."""

    def spoil(self):
        def as_it_lies(tensor):
            transposed = tensor.dim() == 2 and tensor.stride(0) == 1 < tensor.stride(1)
            return tensor.t().contiguous().view(tensor.shape) if transposed else tensor

        def copy(into, of, **more):
            copy_all(into, [as_it_lies(tensor) for tensor in of], **more)

        weightwire.staging.copy_all = copy


@broken
class Unties(Spoils, BrokenMemory):
    """Of tensors that share memory only one is named."""

    def spoil(self):
        def build(specs, *rest, **more):
            untied = [msgspec.structs.replace(spec, ties={}) for spec in specs]
            return build_table(untied, *rest, **more)

        weightwire.trainer_rank.build_table = build


@broken
class TakesAllForLanded(Spoils, BrokenMemory):
    """What arrived in staging memory isn't written to the target."""

    def spoil(self):
        weightwire.targets._same_memory = lambda place, value: True


@broken
class MovesItsTarget(Spoils, BrokenMemory):
    """Each version ends in new memory."""

    def spoil(self):
        fingerprint = MappingTarget.fingerprint

        def moving_fingerprint(target, version):  # right after its commit
            for tensor in target.current().values():
                tensor.data = tensor.data.clone()
            return fingerprint(target, version)

        MappingTarget.fingerprint = moving_fingerprint


# ------------------------------------------------------------------ versions


@broken
class TakesAnyOrder(Spoils, BrokenMemory):
    """Whatever version comes is sent."""

    def spoil(self):
        next_policy = SenderMachine.next_policy

        def any_policy(machine, version):
            machine.last = None
            return next_policy(machine, version)

        SenderMachine.next_policy = any_policy


@broken
class OffersAgain(Spoils, BrokenFilesystem):
    """What is served already is taken for new."""

    def spoil(self):
        newest_offer = ReceiverMachine.newest_offer

        def any_offer(machine):
            serving, machine.serving = machine.serving, None
            try:
                return newest_offer(machine)
            finally:
                machine.serving = serving

        ReceiverMachine.newest_offer = any_offer


@broken
class ClaimsTooEarly(Spoils, BrokenMemory):
    """What is fetched counts as committed."""

    def spoil(self):
        fetch = WeightReceiver._fetch

        def claiming_fetch(receiver):
            fetch(receiver)
            receiver._version = receiver._attempt.policy.version

        WeightReceiver._fetch = claiming_fetch


@broken
class TakesTheVoid(Spoils, BrokenFilesystem):
    """Versions of an earlier sender count, whatever the new one resumes from."""

    def spoil(self):
        readable = weightwire.lifecycle.history.readable_policies

        def all_policies(session, sender):
            record = msgspec.structs.replace(sender.record, resume_from=1 << 40)
            return readable(session, replace(sender, record=record))

        weightwire.lifecycle.history.readable_policies = all_policies


@broken
class MixesOtherwise(Spoils, BrokenMemory):
    """Its digests are its own: both sides agree on them, and nobody else does."""

    def spoil(self):
        weightwire.mixing.GAMMA = 3


# ------------------------------------------------------------------ tables


@broken
class TakesAnyTable(Spoils, BrokenMemory):
    """Names, shapes and dtypes aren't compared."""

    def spoil(self):
        MappingTarget._check_names = lambda target, *about: None
        MappingTarget._check_tensors = lambda target, *about: None


@broken
class TakesAnyName(Spoils, BrokenFilesystem):
    """Names may be paths."""

    def spoil(self):
        weightwire.table._validated = lambda name: name


@broken
class TakesAnyBlob(Spoils, BrokenMemory):
    """What is stored under a digest isn't compared with it."""

    def spoil(self):
        def get_blob(session, digest):
            prefix = keys.table(digest)
            return b"".join(session.store.get(f"{prefix}/{n}") for n in session.children(prefix))

        Session.get_blob = get_blob


# ------------------------------------------------------------------ failures


@broken
class TakesSentForApplied(Spoils, BrokenMemory):
    """Once the bytes have gone, nobody is waited for."""

    def spoil(self):
        SenderMachine._gather_applied = lambda machine, *about: iter(())


@broken
class OutlastsDeadlines(Spoils, BrokenMemory):
    """Every deadline is two seconds late."""

    def spoil(self):
        init = Deadline.__init__

        def late(deadline, seconds):
            init(deadline, seconds)
            deadline._end += 2

        Deadline.__init__ = late


@broken
class TrustsEveryByte(Spoils, BrokenMemory):
    """Digests are computed, and never compared."""

    def spoil(self):
        verify = FetchPlan._verify

        def lenient(plan, *about):
            try:
                return verify(plan, *about)
            except VerificationError:
                return 0

        FetchPlan._verify = lenient


# ------------------------------------------------------------------ snapshots


@broken
class KeepsItsFirstSnapshot(Spoils, BrokenMemory):
    """Copies for late receivers are made once."""

    def spoil(self):
        take = weightwire.snapshot.HostCopies.take

        def once(copies, resolved):
            if not getattr(copies, "taken", False):
                copies.taken = True
                take(copies, resolved)

        weightwire.snapshot.HostCopies.take = once
