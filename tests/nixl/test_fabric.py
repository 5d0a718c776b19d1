"""Which port, on sysfs trees of our making."""

from __future__ import annotations

import pytest
import torch

from weightwire_nixl.agent import Agent
from weightwire_nixl.fabric import choose_fabric, find_ports, nearest_ports

GPU = torch.device("cuda", 0)


class Tree:
    """A fake /sys."""

    def __init__(self, root):
        self.root = root

    def device(self, place, *, numa=0, vendor="0x10de", kind="0x030200"):
        """A PCI device at ``place``, such as ``pci0000:00/0000:00:01.0/0000:01:00.0``."""
        directory = self.root / "devices" / place
        directory.mkdir(parents=True)
        for name, value in (("numa_node", numa), ("vendor", vendor), ("class", kind)):
            (directory / name).write_text(f"{value}\n")
        link = self.root / "bus/pci/devices" / directory.name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(directory)
        return directory

    def adapter(self, name, place, *, numa=0, ports=((1, "4: ACTIVE", "400 Gb/sec (4X NDR)"),)):
        device = self.device(place, numa=numa, vendor="0x15b3", kind="0x020700")
        directory = self.root / "class/infiniband" / name
        directory.mkdir(parents=True)
        (directory / "device").symlink_to(device)
        for number, state, rate in ports:
            port = directory / "ports" / str(number)
            port.mkdir(parents=True)
            (port / "state").write_text(f"{state}\n")
            (port / "rate").write_text(f"{rate}\n")

    def interface(self, name, flags="0x1043", *, master=False):
        directory = self.root / "class/net" / name
        directory.mkdir(parents=True)
        (directory / "flags").write_text(f"{flags}\n")
        if master:
            (directory / "master").mkdir()

    def choose(self, address, environment=None):
        return choose_fabric(GPU, environment or {}, self.root, address)


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


def test_the_port_below_the_same_switch_is_nearest(tree):
    tree.device("pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0")
    tree.adapter("mlx5_0", "pci0000:00/0000:00:02.0/0000:05:00.0")  # same root, other switch
    tree.adapter("mlx5_1", "pci0000:00/0000:00:01.0/0000:01:00.0/0000:03:00.0")
    tree.adapter("mlx5_2", "pci0000:80/0000:80:01.0/0000:81:00.0")
    tree.interface("eth0")
    tree.interface("lo", "0x49")
    tree.interface("down0", "0x1002")
    tree.interface("eth1", master=True)
    fabric = tree.choose("0000:02:00.0")
    assert fabric.options == {"device_list": "eth0,lo,mlx5_1"}
    assert str(fabric) == "mlx5_1:1, the nearest port to cuda:0, of 400 Gb/s, and TCP"


def test_below_different_roots_the_numa_node_decides(tree):
    tree.device("pci0000:80/0000:80:01.0/0000:81:00.0", numa=1)
    # More hops, and yet the one on this node.
    tree.adapter("mlx5_0", "pci0000:00/0000:00:01.0/0000:01:00.0", numa=0)
    tree.adapter("mlx5_1", "pci0000:c0/0000:c0:01.0/0000:c1:00.0/0000:c2:00.0", numa=1)
    assert [str(p) for p in nearest_ports("0000:81:00.0", find_ports(tree.root), tree.root)] == [
        "mlx5_1:1"
    ]


def test_of_ports_at_equal_distance_the_faster_is_taken(tree):
    tree.device("pci0000:00/0000:00:01.0/0000:01:00.0")
    tree.adapter(
        "mlx5_0",
        "pci0000:00/0000:00:02.0/0000:02:00.0",
        ports=((1, "4: ACTIVE", "100 Gb/sec (4X EDR)"),),
    )
    tree.adapter("mlx5_1", "pci0000:00/0000:00:03.0/0000:03:00.0")
    assert "mlx5_1" in tree.choose("0000:01:00.0").options["device_list"]


def test_gpus_with_the_same_ports_take_different_ones(tree):
    for gpu in ("02", "03"):
        tree.device(f"pci0000:00/0000:00:01.0/0000:{gpu}:00.0")
    for adapter, bus in (("mlx5_9", "04"), ("mlx5_10", "05")):
        tree.adapter(adapter, f"pci0000:00/0000:00:01.0/0000:{bus}:00.0")
    chosen = [tree.choose(f"0000:{gpu}:00.0").options["device_list"] for gpu in ("02", "03")]
    assert chosen == ["mlx5_9", "mlx5_10"]


def test_ports_that_are_down_dont_count(tree):
    tree.device("pci0000:00/0000:00:01.0/0000:01:00.0")
    tree.adapter(
        "mlx5_0",
        "pci0000:00/0000:00:01.0/0000:02:00.0",
        ports=((1, "1: DOWN", "400 Gb/sec"), (2, "4: ACTIVE", "200 Gb/sec (2X NDR)")),
    )
    assert tree.choose("0000:01:00.0").options == {"engine_config": "NET_DEVICES=mlx5_0:2"}


@pytest.mark.parametrize("address", ["0000:99:00.0", "../../etc", ""])
def test_an_unknown_gpu_leaves_the_choice_to_ucx(tree, address):
    tree.adapter("mlx5_0", "pci0000:00/0000:00:01.0/0000:02:00.0")
    assert tree.choose(address).options == {}


def test_without_infiniband_the_choice_is_left_to_ucx(tree):
    tree.device("pci0000:00/0000:00:01.0/0000:01:00.0")
    assert tree.choose("0000:01:00.0").options == {}


@pytest.mark.parametrize(
    "environment", [{"UCX_NET_DEVICES": "mlx5_7:1"}, {"UCX_TLS": "tcp,cuda_copy"}]
)
def test_the_environment_wins(tree, environment):
    tree.device("pci0000:00/0000:00:01.0/0000:01:00.0")
    tree.adapter("mlx5_0", "pci0000:00/0000:00:01.0/0000:02:00.0")
    fabric = tree.choose("0000:01:00.0", environment)
    assert fabric.options == {}
    ((name, value),) = environment.items()
    assert str(fabric) == f"{name}={value} by the environment"


def test_host_memory_needs_no_port(tree):
    tree.adapter("mlx5_0", "pci0000:00/0000:00:01.0/0000:02:00.0")
    assert choose_fabric(torch.device("cpu"), {}, tree.root).options == {}


def test_nixl_passes_these_options_on_to_ucx():
    """An interface named before the last part of the list is used, without a port number."""
    interfaces = {}
    for options in ({}, {"device_list": "lo,none"}, {"engine_config": "NET_DEVICES=lo"}):
        agent = Agent("fabric", options)
        interfaces[str(options)] = len(agent.metadata())
        agent.close()
    everything, listed, one = interfaces.values()
    assert listed == one <= everything  # of one interface, not of all
