"""Which claims of the original analysis hold, each with the figures of the model's own configuration."""

from collections.abc import Iterable, Iterator

from kimi_jax.estimator.acceptance import rate_for_length
from kimi_jax.ledger.models import k26
from kimi_jax.ledger.routing import uniform
from meshes import Layout, LayoutError, expert_slots, preset


def errata() -> Iterator[str]:
    """A Markdown section: each claim, whether it holds, and the derivation."""
    # These import jax, for which `--help` should not wait.
    from kimi_jax.ledger.step import Step, cache_bytes, ledger
    from kimi_jax.ledger.weights import model_held

    model = k26()
    one_token = Step(model, Layout(), requests=1, rows=1, context=1)
    total = {part: need.weights for part, need in ledger(one_token).items() if need.weights}
    layers = model.num_moe_layers
    experts = model_held(model, Layout(), one_token.dtype, model.n_routed_experts)["experts"]
    expert, packed = experts.values / layers / model.n_routed_experts, experts.values / 2
    expert_bytes = experts.bytes / layers / model.n_routed_experts
    rest = sum(total.values()) - total["experts"]
    active = layers * model.num_experts_per_tok * expert_bytes
    row = model.hidden_size * 2
    routing = uniform(model.n_routed_experts, model.num_experts_per_tok)
    yield "## Which of its claims hold, and which do not"
    yield ""
    claims = (
        ("384 experts, the shared one among them", "no",
         f"{model.n_routed_experts} routed and {model.n_shared_experts} shared; {layers} MoE layers and "
         f"{model.first_k_dense_replace} dense one, not 61"),
        ("an expert is 22 MB, all are 507 GB", "packed numbers only",
         f"3 · 7168 · 2048 · ½ B = {expert / 2e6:.2f} MB; with a bfloat16 scale for each 32, "
         f"{expert_bytes / 1e6:.2f} MB. "
         f"All: {packed / 1e9:.1f} GB packed, {total['experts'] / 1e9:.1f} GB with scales"),
        ("about 40 GB besides the experts, 548 GB in all", "no",
         f"{rest / 1e9:.1f} GB besides, {sum(total.values()) / 1e9:.1f} GB in all"),
        ("one token reads 11.9 GB", "experts only",
         f"8 · {expert_bytes / 1e6:.2f} MB · {layers} = {active / 1e9:.2f} GB of experts, and "
         f"{(rest - total['embedding']) / 1e9:.1f} GB of everything else"),
        ("with one stream about 9 experts are active", "for one row only",
         f"a tree of 9 rows touches {routing.distinct_experts(9):.1f} of 384, "
         f"of 33 rows {routing.distinct_experts(33):.1f}"),
        ("256 tokens through an all-to-all are 3.5 GB", "1000 times too much",
         f"256 · {row:,} B = {256 * row / 1e6:.2f} MB, {8 * 256 * row / 1e6:.1f} MB with 8 copies. "
         f"What costs is latency, about 50 µs a layer"),
        ("tp 72", "impossible", _refusal()),
        ("EP-36 and EP-72 with 10.7 and 5.3 experts a GPU", "impossible without replicas",
         f"experts come whole: {expert_slots(384, 36)} slots on 36, {expert_slots(384, 72)} on 72, "
         f"so the fullest GPU reads 6 at 72, {6 * expert_bytes * layers / 8e12 * 1e3:.2f} ms at 8 TB/s, not 0.9"),
        ("61 or 120 all-reduces", "no",
         f"{2 * model.num_hidden_layers} and one for the logits under tp; an expert exchange is {2 * layers} "
         f"all-to-alls"),
        ("an all-reduce takes 1–2 µs, and its time grows little with GPUs", "partly",
         "measured 5–7 µs on 8 GPUs of one node for 16–128 KB; beyond 8 nothing is public"),
        ("NVLink of a B300 is 900 GB/s both ways", "no", "1.8 TB/s both ways, 900 GB/s one way"),
        ("acceptance 4.4 with a block of 8", "plausible", "the K2.5 drafter's card has 3.7 to 5.5"),
        ("acceptance 14 with a block of 16", "no",
         f"needs a hit rate of {rate_for_length(14, 16):.3f} at every position; the best published tree "
         f"of any drafter reaches 13, DDTree 10.7, and no public Kimi drafter has a block of 16"),
        ("570–765 and 815–1,090 tokens/s on one node", "as far as the acceptance goes",
         "both ranges are one step time each (18.3 and 12.8 ms) and an acceptance from 10.5 to 14"),
        ("303 tokens/s", "a projection", "nothing was measured; all-reduces are left out"),
        ("HGX is best run as tp 8 replicas", "for few users only",
         f"every tp rank holds and reads the whole latent cache, {cache_bytes(one_token):,.0f} B a token"),
        ("expert parallelism scales more than linearly", "no",
         "its own table: 3.5 times the speed for 9 times the GPUs"),
    )  # fmt: skip
    yield from markdown_table(("claim", "holds?", "derivation"), claims)


def _refusal() -> str:
    from kimi_jax.ledger import layout_rules

    try:
        layout_rules.check(k26(), preset("nvl72").with_axes(ep=1, tp=72).layout)
    except LayoutError as error:
        return str(error)
    raise AssertionError("tp 72 was not refused")


def markdown_table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """Lines of a Markdown table, and an empty one after it."""
    header = list(header)
    yield "| " + " | ".join(header) + " |"
    yield "|" + "---|" * len(header)
    for row in rows:
        yield "| " + " | ".join(row) + " |"
    yield ""
