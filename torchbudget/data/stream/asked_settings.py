"""The options of a stream, for the ranks that there are."""

from __future__ import annotations

from torchbudget.data.framework_loader import check_framework_loader
from torchbudget.data.same_on_ranks import check_same_on_ranks
from torchbudget.data.stream.settings import Settings
from torchbudget.distributed import AskedRanks
from torchbudget.errors import OptionError, StateMismatchError
from torchbudget.plan.fingerprint import Plain


class AskedSettings:
    """Settings that are those of the ranks that there are when they are asked for.

    Args:
        settings: for the ranks of now.
        ranks: asked again whenever they are needed.
    """

    def __init__(self, settings: Settings, ranks: AskedRanks) -> None:
        self.ranks = ranks
        self._settings = settings
        self._number = ranks.now()[0]

    def now(self, *, begun: bool, loaded: bool) -> Settings:
        """The settings for the ranks of now.

        Args:
            begun: an iteration has begun with those of before.
            loaded: a state was loaded under them.

        Raises:
            OptionError: there are others, and an iteration has begun; or an option does not go with
                them.
            StateMismatchError: there are others, so that the loaded position means other samples.
        """
        number = self.ranks.now()[0]
        if number != self._number:
            self._settings = self._for(number, begun=begun, loaded=loaded)
            self._number = number
        return self._settings

    def check_ranks(self, settings: Settings, position: Plain) -> None:
        """Raise where samples would be lost: `ShardedTwiceError`, `RankError`.

        Args:
            settings: of now.
            position: where the loop begins.
        """
        check_framework_loader(self.ranks.now()[0])
        if settings.source.split != "ranks":  # else each reads its own samples, in its own way
            check_same_on_ranks(self.ranks, lambda: settings.shared | position)

    def _for(self, number: int, *, begun: bool, loaded: bool) -> Settings:
        before, settings = self._settings, self._settings.for_ranks(number)
        if begun:
            raise OptionError(
                f"a loop over this stream began on num_replicas={self._number}, and "
                f"torch.distributed has {number} ranks now, which would take other samples: start "
                "it before the first loop, or choose another epoch by set_epoch() after it"
            )
        if loaded and settings.order != before.order:
            raise StateMismatchError(
                f"the state was loaded on {self._number} ranks, where windows are {before.window} "
                f"samples by default, but {settings.window} on {number} ranks: give window=…, or "
                "load it after torch.distributed started"
            )
        return settings
