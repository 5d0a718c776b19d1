"""The lifecycle of a version: one state machine for each side, the same for every backend.

::

    sender                                     receiver
                                                            newest offer
    IDLE ── offer ──> OFFERED                  IDLE ─────────────────────> PREPARING
      ^                  │ all ready (1)         ^    ^                        │ receiver_ready
      │                  v                       │    └─── aborted ── READY <──┘
      │               STARTED                    │                      │ started
      │                  │ bytes moved,          │                      v
      │                  │ all applied (2)       │                  INSTALLING ── failed ──> TAINTED
      │                  v                       │                      │ commit                │
      ├── finished ── CLOSING                    │                      v                       │
      └── aborted, from any                      └──────────────── APPLIED     newest offer <───┘

(1) A ``store`` backend moves its bytes first: ``started`` then means that they
can be read.  (2) Only with ``wait="applied"``, or in waves.

With ``max_unavailable`` a version goes round once for each wave of receivers, as the
next attempt; the version is finished by the last one (``Outcome.more``).  Readers of
stored versions take turns between READY and INSTALLING instead (``turns``).

Both machines are generators (``waiting.Steps``): they read and write session
records, yield ``Waiting`` when another process must act first, and yield an
``Act`` when their driver must move bytes.  Each record is one atomic write, and
a crash between any two of them leaves a session from which a restart recovers:

* a version counts as finished only by its ``outcome``, created exactly once, and
  only in a readable incarnation (``readable_policies``);
* a receiver's status stops naming the old version before its first byte changes,
  and names the new one after ``commit`` returned on every rank;
* ``receiver_applied`` is the receiver's last write: a sender that has read it may
  take the session away.
"""
