"""The checks that core brings: the host, torch, a session's directory, a session."""

from __future__ import annotations

from weightwire.doctor.check import Check

__all__ = ["CHECKS"]

_HOST = "weightwire.doctor.host"
_TORCH = "weightwire.doctor.machine"
_DIRECTORY = "weightwire.doctor.directory"
_TORCH_REMEDY = "reinstall torch for this machine: https://pytorch.org/get-started/locally"

CHECKS = (
    Check(
        "host.shm",
        "shared memory: 32 MiB reserved, written and read back",
        f"{_HOST}:shared_memory",
        remedy="enlarge /dev/shm (docker run --shm-size=8g, or --ipc=host)",
    ),
    Check(
        "host.memlock",
        "locked memory: 64 MiB locked, as RDMA registration needs it",
        f"{_HOST}:locked_memory",
        remedy="raise the limit: ulimit -l unlimited, or docker run --ulimit memlock=-1",
    ),
    Check(
        "host.clock",
        "clocks: the monotonic one by which leases are judged, and the wall clock",
        f"{_HOST}:clocks",
        remedy="repair the host's clock; nothing keeps time on it",
    ),
    Check(
        "torch.tensors",
        "torch: casts and copies on the CPU",
        f"{_TORCH}:tensors",
        60.0,
        _TORCH_REMEDY,
    ),
    Check(
        "torch.cuda",
        "CUDA: allocation, a copy there and back, and a sum on each GPU",
        f"{_TORCH}:cuda",
        120.0,
        "run nvidia-smi; install a torch whose CUDA version the driver supports",
    ),
    Check(
        "torch.gloo",
        "a Gloo broadcast between two processes",
        f"{_TORCH}:gloo",
        90.0,
        "set GLOO_SOCKET_IFNAME to an interface that resolves; " + _TORCH_REMEDY,
    ),
    Check(
        "directory.rename",
        "files replaced by rename while another process reads them",
        f"{_DIRECTORY}:rename",
        60.0,
        "choose a directory on a filesystem with atomic renames (local, NFS, Lustre, CephFS)",
    ),
    Check(
        "directory.fsync",
        "fsync of files and of their directory",
        f"{_DIRECTORY}:fsync",
        60.0,
        "choose a directory on a filesystem that keeps what was synced",
    ),
    Check(
        "directory.lock",
        "hard links that one of two processes wins (what sessions use), and flock",
        f"{_DIRECTORY}:lock",
        60.0,
        "choose a directory on a filesystem with hard links (local, NFS), or a redis:// session",
    ),
    Check(
        "session.reach",
        "the session's store: opened, read, and its members' records decoded",
        "weightwire.doctor.session:reach",
        60.0,
        "correct the URL, or start the process that serves it",
    ),
)
