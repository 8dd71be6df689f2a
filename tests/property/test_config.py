"""Any configuration survives being written as text."""

from types import MappingProxyType

import yaml
from hypothesis import given
from hypothesis import strategies as st

from kata_pin.base.config.table import as_data, as_yaml
from kata_pin.base.config.tree import Audit, Config, Hook, Intruders, Nri, NriEnabled, Paths
from kata_pin.base.cpuset import EMPTY, CpuSet
from kata_pin.base.documents.answers import ConfigDocument
from kata_pin.base.settings import ExclusiveMode, Overhead, OverheadKind
from kata_pin.base.values import Mode, ThreadRole
from kata_pin.service.configuration import from_data, from_text
from kata_pin.service.protocol import decode, encode

cpu_lists = st.sets(st.integers(0, 300), min_size=1, max_size=20).map(CpuSet)
overheads = st.one_of(
    st.sampled_from(["auto", "sandbox", "leave"]).map(lambda w: Overhead(OverheadKind(w))),
    st.integers(1, 64).map(lambda k: Overhead(OverheadKind.RESERVE, reserve=k)),
    cpu_lists.map(lambda c: Overhead(OverheadKind.CPUS, cpus=c)),
)
paths = st.from_regex(r"/[A-Za-z0-9 :#'\"\\\[\]{}é-]{0,20}[A-Za-z0-9]", fullmatch=True)
names = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,8}", fullmatch=True)
configs = st.builds(
    Config,
    mode=st.sampled_from(Mode),
    runtime_dir=paths,
    group=names,
    hypervisors=st.lists(paths, max_size=3).map(tuple),
    overhead=overheads,
    overhead_roles=st.dictionaries(st.sampled_from(ThreadRole), overheads, max_size=4).map(
        MappingProxyType
    ),
    housekeeping=cpu_lists | st.just(EMPTY),
    exclusive_handlers=st.dictionaries(names, st.sampled_from(ExclusiveMode), max_size=3).map(
        MappingProxyType
    ),
    intruders=st.sampled_from(Intruders),
    paths=st.builds(Paths, vc=paths, bundle_roots=st.lists(paths, max_size=3).map(tuple)),
    audit=st.builds(
        Audit,
        affinity_s=st.integers(1, 600_000).map(lambda n: max(0.1, n / 10_000)),
        deep_s=st.integers(61, 86400).map(float),
    ),
    nri=st.builds(
        Nri,
        enabled=st.sampled_from(NriEnabled),
        index=st.integers(0, 99).map("{:02}".format),
    ),
    hook=st.builds(Hook, pin_ms=st.integers(0, 10000), strict=st.booleans()),
)


@given(configs)
def test_any_config_survives_its_own_text(config: Config) -> None:
    """What `config show` prints reads back as the same Config, whole or changed lines only."""
    assert from_text(as_yaml(config)) == config
    assert from_text(as_yaml(config, changed_only=True)) == config


@given(configs)
def test_any_config_is_plain_yaml(config: Config) -> None:
    """The text is YAML for every other reader too."""
    assert set(yaml.safe_load(as_yaml(config))) == set(as_data(config))


@given(configs)
def test_any_config_survives_its_own_document(config: Config) -> None:
    """What the daemon answers for `config show --running` reads back as the same Config."""
    document = ConfigDocument(settings=as_data(config), running=True, refused=None)
    assert from_data(decode(encode(document), ConfigDocument).settings) == config
