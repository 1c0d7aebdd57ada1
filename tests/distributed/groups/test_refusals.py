"""What groups of ranks cannot do is said before any rank starts, or as they meet."""

import pytest

from gmeta.config.sharding import ShardingConfig, check_groups, check_sequences, check_sharding
from gmeta.errors import ConfigError
from tests.support.refusals import catch_message


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            ShardingConfig(sync_every=10),
            "sharding.sync_every = 10 is of groups of ranks, and sharding.groups = 1. Set groups, "
            "or sync_every = 1",
        ),
        (
            ShardingConfig(groups=2, overlap_sync=True),
            "sharding.outer_momentum = 0 and sharding.overlap_sync = true are of averages, and "
            "with sharding.sync_every = 1 there are none. Set sync_every above 1, or leave these "
            "as they are by default",
        ),
        (
            ShardingConfig(groups=2, exchange="torchrec"),
            'sharding.groups = 2 with sharding.exchange = "torchrec", which has no copies of '
            'tables. Set sharding.exchange = "host", or sharding.groups = 1',
        ),
    ],
)
def test_keys_without_a_meaning_are_refused(config: ShardingConfig, message: str) -> None:
    assert catch_message(ConfigError, check_sharding, config, ["t"], "sgd") == message


def test_ranks_fill_groups_evenly() -> None:
    message = catch_message(ConfigError, check_groups, ShardingConfig(groups=3), 4)
    assert message == (
        "sharding.groups = 3 with 4 ranks: each group needs the same number of them. Set it to a "
        "divisor of the number of ranks, or to 1"
    )


def test_groups_with_layers_of_their_own_share_no_sequence() -> None:
    config = ShardingConfig(groups=2, sync_every=2, sequence="ring")
    assert catch_message(ConfigError, check_sequences, config, "hstu", 1) == (
        'sharding.sequence = "ring" has ranks share a long task\'s events, and with '
        "sharding.sync_every = 2 groups of ranks have layers of their own. Set it to 1, or set "
        'sharding.sequence = "none"'
    )
