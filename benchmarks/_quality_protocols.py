"""The data sets of benchmarks/quality.py: how each is prepared, trained and scored."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from _common import REPOSITORY

EXAMPLES = REPOSITORY / "examples"
PLAIN = EXAMPLES / "plain"
CLICKS = ("auc", "logloss")
RATINGS = ("mae", "auc")


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """A data set with its splits; `folder` is that of its raw files below --data, "" for none.

    `config` and `plain` are files of examples/: the meta-learned model, and the same model without
    an inner loop. `draws` says whether support and query rows can be drawn anew: not where the
    support is the past, or was given. `tuned` and `by_hand` tell how many runs chose the settings
    of adapted and plain, `judged_by` on which splits. `why` says in a sentence why adapting is not
    ahead everywhere. `others` are other algorithms: overrides of the adapted config by name, run
    with the first seed alone. One with a `log` has neither recipe nor config: this query makes a
    log of the files of the folder `{raw}`, or of what its recipe writes, and what `gmeta init`
    makes of that, with the options `init`, is all that is set, but for `split_by` in the place of
    the shares of tasks. With `events` all have the dataset of `gmeta init --events`, and the config
    of it or, the others, that of `gmeta init`."""

    name: str
    title: str
    folder: str = ""
    recipe: str = ""
    config: str = ""
    splits: tuple[str, ...]
    metrics: tuple[str, ...]
    draws: bool
    about: str
    tuned: tuple[int, int] = (0, 0)
    by_hand: tuple[int, int] = (0, 0)
    judged_by: str = "nothing was chosen"
    why: str
    prepare: tuple[str, ...] = ()
    train: tuple[str, ...] = ()  # overrides of all configs
    others: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    log: str = ""
    init: tuple[str, ...] = ()
    events: bool = False
    split_by: str = ""

    def configs(self, place: Path) -> dict[str, Path]:
        """The config of each run by its name; `place` is the folder of what was made."""
        if self.log:
            return dict.fromkeys(("adapted", "plain"), place / "made" / "train.toml")
        return {"adapted": EXAMPLES / self.config, "plain": PLAIN / self.config}


_BY_TIME = (
    "Ratings of at least 4 as clicks, a user is a task. The newest fifth of all rows is `test`: a "
    "user's earlier rows are support, those in the window query. `test-cold` are users without a "
    "row before the window; their first half is support."
)
PROTOCOLS = (
    Protocol(
        name="movielens-1m",
        title="MovieLens-1M, MeLU's split",
        folder="ml-1m",
        recipe="movielens-1m",
        config="movielens-1m.toml",
        splits=("user-cold", "item-cold", "user-item-cold"),
        metrics=RATINGS,
        draws=True,
        about=(
            "Ratings in the protocol of MeLU (KDD 2019, arXiv 1908.00413). A user is a task; 10 of "
            "their 13 to 100 ratings are the query rows. `user-cold` are users that training never "
            "saw with items that it knows, `item-cold` the reverse, `user-item-cold` both new. "
            "AUC is that of a rating of at least 4. All models are trained on `fit`, 84 % of the "
            "training users, and chosen on the others, so that every baseline is tuned on users "
            "that training never saw, and on items of later years that it never saw; the example "
            "itself trains on all of them."
        ),
        tuned=(20, 39),
        by_hand=(71, 48),
        judged_by="the three `valid-` groups in the last 43 adapted and 70 plain trials; before, "
        "`valid-user-cold`",
        why=(
            "support features put what the support rows say into both models, and most of what "
            "there is to know is the same for both."
        ),
        prepare=("--validation",),
        train=(
            "data.train_split=fit",
            'data.valid_split=["valid-user-cold", "valid-item-cold", "valid-user-item-cold"]',
        ),
        others={
            "encoder": ("algorithm.name=encoder",),
            "encoder_maml": ("algorithm.name=encoder_maml",),
        },
    ),
    Protocol(
        name="metaemb",
        title="MovieLens-1M, Meta-Embedding's split",
        folder="ml-1m",
        recipe="metaemb",
        config="metaemb.toml",
        splits=("cold", "warm-a", "warm-b", "warm-c"),
        metrics=CLICKS,
        draws=False,
        about=(
            "Ratings of at least 4 as clicks, a movie is a task (Pan et al., SIGIR 2019, arXiv "
            "1904.11547). Trained on the 1,058 movies with at least 300 ratings; scored on the "
            "1,127 with 80 to 299, always on the same rows, before any of a movie's ratings is "
            "known (`cold`) and after 20, 40 and 60. The paper's marks for AUC, one run of DeepFM: "
            ".6528, .6772, .6927, .7019, and with Meta-Embedding .6693, .6875, .6998, .7073; those "
            "models had no support features as inputs. All models here are trained on `fit`, 79 % "
            "of the old movies' rows, and chosen on the others; the example itself trains on all "
            "of them."
        ),
        tuned=(1, 18),
        by_hand=(21, 4),
        judged_by="the four `valid-` groups in the last 19 adapted trials and the last 15 plain "
        "ones, 12 of `gmeta tune`; before, `valid-warm-a`",
        why=(
            "plain training learns from every row, meta-training from the query rows of a draw, on "
            "average 57 % of them; without a rating the trees have the smaller logloss."
        ),
        prepare=("--validation",),
        train=(
            "data.train_split=fit",
            'data.valid_split=["valid-cold", "valid-warm-a", "valid-warm-b", "valid-warm-c"]',
        ),
        others={
            "metaemb": (
                "algorithm.name=metaemb",
                'algorithm.adapt_embeddings=["item"]',
                'algorithm.options.content=["title", "year", "genre"]',
                "algorithm.inner_lr=0.1",
                "algorithm.inner_steps=3",
                "algorithm.support_prior=5.0",
            )
        },
    ),
    Protocol(
        name="amazon",
        title="Amazon ratings by time",
        folder="amazon",
        recipe="amazon",
        config="amazon.toml",
        splits=("test", "test-cold"),
        metrics=CLICKS,
        draws=False,
        about=_BY_TIME,
        tuned=(32, 30),
        by_hand=(35, 37),
        judged_by="`valid` and `valid-cold` in the last 10 trials of `gmeta tune`, none cut "
        "short, and the last by hand; before, `valid`",
        why=(
            "there is little to learn beyond the means of user and item: the best trees, which "
            "start from the bias model, are a single tree."
        ),
    ),
    Protocol(
        name="movielens-100k",
        title="MovieLens-100k by time",
        folder="ml-100k",
        recipe="movielens-100k",
        config="movielens-100k.toml",
        splits=("test", "test-cold"),
        metrics=CLICKS,
        draws=False,
        about=_BY_TIME,
        tuned=(31, 28),
        by_hand=(80, 86),
        judged_by="`valid` and `valid-cold` in the last 10 trials of `gmeta tune`, none cut "
        "short, and the last by hand, 13 adapted and 76 plain; before, `valid`",
        why=(
            "about 110 and 190 tasks are few: most intervals are as wide as any lead of one model "
            "that knows the support rows over another."
        ),
    ),
    Protocol(
        name="synthetic",
        title="Synthetic clicks",
        folder="",
        recipe="synthetic",
        config="demo.toml",
        splits=("user-cold", "item-cold", "user-item-cold"),
        metrics=CLICKS,
        draws=False,
        about=(
            "Clicks on made-up items by users with hidden tastes, which only their own clicks "
            "tell: data that meta-learning is made for. Both models have the demo's rates: with "
            "the rate and steps that an evaluation chooses, no trial for plain training is better "
            "on `valid`."
        ),
        tuned=(0, 12),
        by_hand=(2, 0),
        judged_by="`valid`",
        why=(
            "of items that training knows, the trees' statistics say nearly as much to them as an "
            "inner step does."
        ),
        prepare=("--tasks", "16000"),
    ),
)


def _at_the_first_try(
    name: str, title: str, about: str, log: str, label: str, metrics: tuple[str, ...] = CLICKS,
    *, task: str = "", draws: bool = True,
) -> Protocol:  # fmt: skip
    words = ("--label", label, *(("--task", task) if task else ()))
    return Protocol(
        name=name,
        title=title,
        folder="cold",
        splits=("user-cold",),
        metrics=metrics,
        draws=draws,
        about=(
            f"{about} As `gmeta init {' '.join(words)} --run` has it, nothing is tuned: the "
            "adapted run goes on from the plain one, and stays it where validation finds nothing "
            "better."
        ),
        why="both models have the same statistics of support rows and items.",
        log=log,
        init=words,
    )


NO_EVENTS, NO_EVENTS_PLAIN = "without events", "without events, plain"


def _with_events(
    name: str, title: str, about: str, log: str, label: str, *,
    folder: str = "", recipe: str = "", prepare: tuple[str, ...] = (), split: str = "user-cold",
    split_by: str = "",
) -> Protocol:  # fmt: skip
    return Protocol(
        name=f"events-{name}",
        title=f"Events: {title}",
        folder=folder,
        recipe=recipe,
        splits=(split,),
        metrics=CLICKS,
        draws=False,
        about=about,
        why=(
            "fine-tuned plain training reads the same events, and where order says little "
            "statistics of the same rows say as much."
        ),
        prepare=prepare,
        others={NO_EVENTS_PLAIN: ("algorithm.name=none",), NO_EVENTS: ()},
        log=log,
        init=("--label", label, "--task", "user"),
        events=True,
        split_by=split_by,
    )


WITH_EVENTS = (
    _with_events(
        "grocery", "grocery purchases", "Purchases against drawn items; the newest are predicted.",
        "SELECT user_id AS user, item_id AS item, i_category AS category, l.time, 1 AS bought "
        "FROM '{raw}/grocery.tsv' l JOIN '{raw}/grocery_items.tsv' USING (item_id)",
        "bought", folder="cold",
    ),
    _with_events(
        "movielens-100k", "MovieLens-100k by time",
        "Ratings of at least 4 as clicks; the newest fifth of all rows is predicted.",
        """SELECT i."user_id:token" AS "user", i."item_id:token" AS item,
        split_part(m."class:token_seq", ' ', 1) AS genre, m."release_year:token" AS "year",
        i."timestamp:float"::BIGINT AS "time", (i."rating:float" >= 4)::INT AS click
        FROM read_csv('{raw}/ml-100k.inter', delim='\t', header=true) i
        JOIN read_csv('{raw}/ml-100k.item', delim='\t', header=true) m USING ("item_id:token")""",
        "click", folder="ml-100k", split="test",
        split_by="by_time = { train = 0.7, valid = 0.1, test = 0.2 }",
    ),
    _with_events(
        "synthetic-days", "made-up clicks whose tastes drift",
        "Five days of 2,000 users each; a user's taste turns into another, a tenth of a circle a "
        "day, and the last day is predicted. The probabilities that made its clicks have an AUC of "
        ".88.",
        'SELECT "user", item, genre, brand, age, region, device, "hour", price, item_age, '
        "position, time, click FROM '{raw}/day=*/*.parquet'",
        "click", recipe="synthetic-days",
        prepare=("--days", "5", "--tasks", "2000", "--drift", "0.1"),
        split="test", split_by="by_time = { train = 0.6, valid = 0.2, test = 0.2 }",
    ),
)  # fmt: skip

# As a newcomer meets gmeta. On the page once they are measured.
FIRST_TRY = (
    _at_the_first_try(
        "book-crossing", "Book-Crossing ratings", "Ratings from 1 to 10 of 1,295 readers.",
        "FROM '{raw}/book_crossing.csv'", "rating", RATINGS,
    ),
    _at_the_first_try(
        "steam-played", "Steam: played at all", "Of games that users own, which they have played.",
        'SELECT "user", game, (hours > 0)::INT AS played FROM \'{raw}/steam.csv\'', "played",
    ),
    _at_the_first_try(
        "steam-hours", "Steam: hours played", "Hours of the games that users have played.",
        "FROM '{raw}/steam.csv' WHERE hours > 0", "hours", RATINGS,
    ),
    _at_the_first_try(
        "retailrocket-cart", "Retailrocket: views to carts", "Which views end in the cart.",
        "SELECT visitor, item, cart FROM '{raw}/retailrocket.csv'", "cart",
    ),
    _at_the_first_try(
        "retailrocket-purchase", "Retailrocket: carts to purchases", "What of the cart is bought.",
        "SELECT visitor, item, purchase FROM '{raw}/retailrocket.csv' WHERE cart = 1", "purchase",
    ),
    _at_the_first_try(
        "grocery", "Grocery purchases", "Purchases against drawn items; the newest are predicted.",
        "SELECT user_id, item_id, i_category, l.time, 1 AS bought FROM '{raw}/grocery.tsv' l "
        "JOIN '{raw}/grocery_items.tsv' USING (item_id)", "bought", draws=False,
    ),
)  # fmt: skip
