"""Composes batches ahead of their use: a bounded block cache, threads, and a queue in order."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from metaio.format.block import Block
from metaio.read.array_pool import ArrayPool
from metaio.read.batch import TaskBatch
from metaio.read.compose import compose
from metaio.read.episode_order import BlockEpisodes

if TYPE_CHECKING:
    from metaio.format.dataset import Dataset

Plan = list[tuple[str, BlockEpisodes]]
_BlockKey = tuple[str, int]
_LoadingPlan = list[tuple[Future[Block], BlockEpisodes]]
# Done once the blocks of a batch are loaded; its result, in turn, is the batch to come.
_StartedBatches = Future[Future[TaskBatch]]

# Remote blocks wait for requests, not for the CPU: more of them are fetched at once than decoded.
_REMOTE_FETCHES = 8
# Plans are small: so many are drawn ahead, to find the blocks that will be needed.
_MAX_PLANS_AHEAD = 4_096


class _BusyClock:
    """Seconds in which at least one thread was at work, and the tasks composed in them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_at_work = 0
        self._since_s = 0.0
        self._busy_s = 0.0
        self.num_tasks = 0  # composed

    def __enter__(self) -> None:
        with self._lock:
            if not self._num_at_work:
                self._since_s = time.perf_counter()
            self._num_at_work += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_at_work -= 1
            if not self._num_at_work:
                self._busy_s += time.perf_counter() - self._since_s

    def count_batch(self, num_tasks: int) -> None:
        """Count one more batch, of `num_tasks` tasks."""
        with self._lock:
            self.num_tasks += num_tasks

    def read_s(self) -> float:
        """Return the seconds so far."""
        with self._lock:
            under_way_s = time.perf_counter() - self._since_s if self._num_at_work else 0.0
            return self._busy_s + under_way_s


class BlockCache:
    """Decoded blocks within a budget; loads in background threads, evicts least recently used."""

    def __init__(
        self, dataset: Dataset, budget_bytes: int, pool: ThreadPoolExecutor, clock: _BusyClock
    ) -> None:
        self._dataset = dataset
        self._clock = clock
        self._budget_bytes = budget_bytes
        self._pool = pool
        self._lock = threading.Lock()
        self._blocks: OrderedDict[_BlockKey, tuple[Future[Block], int]] = OrderedDict()
        self._held_bytes = 0
        self._num_loading = 0

    def load(self, key: _BlockKey, num_bytes: int) -> Future[Block]:
        """Return the future of a block, which is read unless it is held already."""
        with self._lock:
            if key in self._blocks:
                self._blocks.move_to_end(key)
                return self._blocks[key][0]
            future = self._pool.submit(self._read, *key)
            self._num_loading += 1
            self._blocks[key] = (future, num_bytes)
            self._held_bytes += num_bytes
            while self._held_bytes > self._budget_bytes and len(self._blocks) > 1:
                # Safe: a batch that still needs the block holds its future.
                _, (_, freed_bytes) = self._blocks.popitem(last=False)
                self._held_bytes -= freed_bytes
        # Outside the lock: a future that is done calls back at once, and the callback locks.
        future.add_done_callback(self._on_loaded)
        return future

    def _read(self, split: str, block: int) -> Block:
        with self._clock:
            return self._dataset.read_block(split, block)

    def count_loading(self) -> int:
        """Return the number of blocks that are being read."""
        return self._num_loading

    def _on_loaded(self, _: Future[Block]) -> None:
        with self._lock:
            self._num_loading -= 1

    def close(self) -> None:
        """Drop all blocks."""
        with self._lock:
            self._blocks.clear()
            self._held_bytes = 0


class _PlanQueue:
    """Plans drawn but not yet composed; their blocks are loading or held, within a budget."""

    def __init__(
        self, plans: Iterable[Plan], cache: BlockCache, sizes: dict[str, list[int]]
    ) -> None:
        self._plans = iter(plans)
        self._cache = cache
        self._sizes = sizes
        self._waiting: deque[list[tuple[_BlockKey, Future[Block], BlockEpisodes]]] = deque()
        # Plans that use a block: its bytes count once, until the last of these is taken.
        self._uses: Counter[_BlockKey] = Counter()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def draw(self) -> bool:
        """Take one more plan and start loading its blocks; return False if there is none."""
        plan = next(self._plans, None)
        if plan is None:
            return False
        loading = []
        for split, part in plan:
            key, num_bytes = (split, part.block), self._sizes[split][part.block]
            # A block that several plans use is held once.
            self.num_bytes += num_bytes if not self._uses[key] else 0
            self._uses[key] += 1
            loading.append((key, self._cache.load(key, num_bytes), part))
        self._waiting.append(loading)
        return True

    def get(self) -> _LoadingPlan:
        """Return the oldest plan."""
        loading = self._waiting.popleft()
        for key, _, _ in loading:
            self._uses[key] -= 1
            if not self._uses[key]:
                del self._uses[key]
                self.num_bytes -= self._sizes[key[0]][key[1]]
        return [(future, part) for _, future, part in loading]


class BatchPipeline:
    """Turns plans (which episodes of which blocks) into batches, in order, ahead of their use."""

    def __init__(
        self,
        dataset: Dataset,
        *,
        threads: int,
        prefetch_batches: int,
        cache_bytes: int,
        pin_memory: bool = False,
    ) -> None:
        if threads < 1 or prefetch_batches < 1:
            raise ValueError(
                f"threads is {threads} and prefetch_batches is {prefetch_batches}; both must be at "
                "least 1. Raise them"
            )
        self._dataset = dataset
        # With fewer, threads would have no batch to compose.
        self._prefetch_batches = max(prefetch_batches, threads)
        self._cache_bytes = cache_bytes
        self._pin_memory = pin_memory
        # As many batches may be ready or in use at once.
        self._memory = ArrayPool(keep=self._prefetch_batches + 2)
        self._sizes = {name: dataset.block_bytes(name).tolist() for name in dataset.splits}
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="metaio-batch")
        # Local blocks are decoded by the threads that compose; remote ones wait, in their own.
        self._fetch_pool = self._pool
        self._fetches = threads
        if not dataset.is_local:
            self._fetches = max(threads, _REMOTE_FETCHES)
            self._fetch_pool = ThreadPoolExecutor(self._fetches, thread_name_prefix="metaio-fetch")
        self._clock = _BusyClock()
        self._cache = BlockCache(dataset, cache_bytes, self._fetch_pool, self._clock)
        self.wait_s = 0.0

    @property
    def busy_s(self) -> float:
        """Return the seconds in which a batch was being read or composed, waited for or not."""
        return self._clock.read_s()

    @property
    def num_tasks_composed(self) -> int:
        """Return the number of tasks of all batches composed so far, delivered or not."""
        return self._clock.num_tasks

    def run(self, plans: Iterable[Plan], look_ahead: bool = False) -> Generator[TaskBatch]:
        """Yield the batch of each plan, drawing plans as needed, or further with `look_ahead`."""
        return self._drain(_PlanQueue(plans, self._cache, self._sizes), deque(), look_ahead)

    def start(self, plans: Iterable[Plan]) -> Iterator[TaskBatch]:
        """Do as `run` with `look_ahead`, but start on the first batches at once."""
        ahead, queue = _PlanQueue(plans, self._cache, self._sizes), deque[_StartedBatches]()
        self._fill(ahead, queue, look_ahead=True)
        return self._drain(ahead, queue, look_ahead=True)

    def _fill(self, ahead: _PlanQueue, queue: deque[_StartedBatches], look_ahead: bool) -> None:
        # Batches first, then blocks of later ones: the consumer waits for batches.
        while len(queue) < self._prefetch_batches and (len(ahead) or ahead.draw()):
            queue.append(_StartedBatches())
            self._compose_once_loaded(ahead.get(), queue[-1])
        while look_ahead and self._has_room(ahead) and ahead.draw():
            pass

    def _drain(
        self, ahead: _PlanQueue, queue: deque[_StartedBatches], look_ahead: bool
    ) -> Generator[TaskBatch]:
        try:
            while True:
                self._fill(ahead, queue, look_ahead)
                if not queue:
                    return
                begin_s = time.perf_counter()
                batch = queue.popleft().result().result()
                self.wait_s += time.perf_counter() - begin_s
                yield batch
        finally:
            # Also reached when the consumer stops early: cancels what has not begun.
            for begun in queue:
                # Once its blocks are loaded, composing a batch is a future of its own.
                if not begun.cancel() and begun.exception() is None:
                    begun.result().cancel()

    def _compose_once_loaded(self, loading: _LoadingPlan, begun: _StartedBatches) -> None:
        # Submitted earlier, composing would block a thread that could read the next block: two
        # threads would read no faster than one.
        missing = next((future for future, _ in loading if not future.done()), None)
        if missing is not None:
            # A future keeps its callbacks: emptied, this one does not keep other blocks alive.
            waiting = [(loading, begun)]
            missing.add_done_callback(lambda _: self._compose_once_loaded(*waiting.pop()))
        elif any(future.cancelled() for future, _ in loading):
            begun.cancel()  # the pool is closing, and holds the lock that submitting takes
        elif begun.set_running_or_notify_cancel():
            try:
                begun.set_result(self._pool.submit(self._compose, loading))
            except RuntimeError as error:  # closed meanwhile
                begun.set_exception(error)

    def _has_room(self, ahead: _PlanQueue) -> bool:
        # Half of the budget is for blocks ahead, so that they cannot evict those in use.
        return (
            len(ahead) < _MAX_PLANS_AHEAD
            and ahead.num_bytes < self._cache_bytes // 2
            and self._cache.count_loading() < self._fetches
        )

    def _compose(self, loading: _LoadingPlan) -> TaskBatch:
        with self._clock:
            parts = [(future.result(), part.episodes) for future, part in loading]
            batch = compose(self._dataset.features, parts, self._memory)
            self._clock.count_batch(batch.num_tasks)
            # Page-locking takes as long as copying, so it is done here, in the background.
            return batch.pin_memory() if self._pin_memory else batch

    def close(self) -> None:
        """Stop all threads, after the batches that are being composed."""
        # Fetching first: a block that was read submits its batch to the other pool.
        self._fetch_pool.shutdown(wait=True, cancel_futures=True)
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._cache.close()
