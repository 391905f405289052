"""Draft trees change the speed of decoding and nothing else: the same text, the same law, exact limits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ddtree.tree import build_tree, chain
from kimi_jax.decoding.automatic import RoundCosts
from kimi_jax.decoding.engine import PLAIN, Draft
from kimi_jax.decoding.generate import Limits, shape_of
from kimi_jax.decoding.report import Report, rounds_by_tokens
from kimi_jax.decoding.sampling import Sampling, Samplings, filtered
from kimi_jax.decoding.session import Session
from kimi_jax.decoding.speculation import Speculation
from kimi_jax.decoding.state import Dispatch
from kimi_jax.model.rows import causal_rows

GREEDY, HOT = Sampling(), Sampling(temperature=1.0, top_p=0.9)


class Told:
    """Drafts the tokens it was told, by request and position."""

    max_depth, context = 7, None

    def __init__(self, tokens):
        self.tokens = jnp.asarray(tokens)

    def propose(self, model, state):
        positions = state.lengths[:, None] + 1 + jnp.arange(self.max_depth)
        ids = jnp.take_along_axis(self.tokens, jnp.minimum(positions, self.tokens.shape[1] - 1), axis=1)
        return jax.vmap(lambda ids, root: chain(jnp.zeros(self.max_depth), ids, root=root))(ids, state.anchors)


class Fixed:
    """Drafts the best tree of 6 nodes of one table of log-probabilities, whatever the text."""

    context = None

    def __init__(self, log_probs):
        self.log_probs, self.max_depth = log_probs, log_probs.shape[0]

    def propose(self, model, state):
        return jax.vmap(lambda root: build_tree(self.log_probs, 6, root=root))(state.anchors)


def texts(engine, prompts, limits, draft=PLAIN, sampling=GREEDY, seed=0):
    found = [[] for _ in prompts]
    for progress in engine.generate(prompts, limits, sampling, seed, draft):
        for text, new in zip(found, progress.new_tokens, strict=True):
            text += new
    return found


def with_drafter(engine, drafter):
    return dataclasses.replace(engine.programs(), speculation=Speculation(drafter))


@pytest.fixture(scope="module")
def prompts(reference):
    ids = reference["input_ids"].tolist()
    return [ids[0], ids[1][:9], ids[2][:1]]


@pytest.fixture(scope="module")
def plain(shallow, prompts):
    return texts(shallow(), prompts, Limits(max_new_tokens=20))


@pytest.mark.parametrize("budget", [0, 16, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 7, 32, 64))])
def test_greedy_text_is_the_same_for_every_budget(budget, shallow, prompts, plain):
    assert texts(shallow(), prompts, Limits(max_new_tokens=20), Draft("ddtree", budget)) == plain


@pytest.mark.parametrize("draft", [
    Draft("chain", 3), Draft("ddtree", 8, keep_chain=True, shared=True), *(pytest.param(draft, marks=pytest.mark.slow)
    for draft in (Draft("chain"), Draft("ddtree", 8, keep_chain=True), Draft("ddtree", 8, shared=True))),
], ids=str)  # fmt: skip
def test_greedy_text_is_the_same_for_every_kind(draft, shallow, prompts, plain):
    assert texts(shallow(), prompts, Limits(max_new_tokens=20), draft) == plain


@pytest.mark.parametrize("row_us", [0.0, 1e6])
def test_greedy_text_is_the_same_with_an_automatic_budget(row_us, shallow, prompts, plain):
    """Plain first, then a probe, then what pays: all rows where they cost nothing, none where they are dear."""
    times = {rows: 1000 + (rows - 1) * row_us for rows in (1, 8, 16)}
    engine = dataclasses.replace(shallow(), costs=lambda requests, context: RoundCosts(times, "estimated"))
    got, last = [[] for _ in prompts], None
    for last in engine.generate(prompts, Limits(max_new_tokens=20, rounds_per_dispatch=4), GREEDY, draft=Draft()):
        for text, new in zip(got, last.new_tokens, strict=True):
            text += new
    assert got == plain
    automatic = engine.automatic(Draft(), len(prompts), 1, 1)
    # A random drafter is right for one row in 320 or so: 2 rounds of 7 nodes in the probe, then 16 rows or one.
    probe, rounds = 2 * 7 * len(prompts), last.counts.rounds.sum() - 3 * len(prompts)
    assert last.counts.nodes.sum() == probe if row_us else probe + 15 * (rounds - 2 * len(prompts))
    assert automatic.acceptance == pytest.approx(1, abs=0.3)


def test_an_automatic_budget_measures_the_machine_it_runs_on(shallow, prompts, plain):
    engine = shallow()
    assert engine.costs is None
    got = [[] for _ in prompts]
    for step in engine.generate(prompts, Limits(max_new_tokens=20), GREEDY, draft=Draft()):
        for text, new in zip(got, step.new_tokens, strict=True):
            text += new
    assert got == plain
    told = engine.automatic(Draft(), len(prompts), 1, 1).as_dict()
    assert told["costs"] == "measured"
    times = told["round_us_by_rows"]
    assert [*times][:2] == [1, 8]
    assert 10 < times[1] < 1e7


@pytest.mark.parametrize("mesh", [pytest.param("hgx-ib-16", marks=pytest.mark.slow), "nvl72"])
def test_greedy_text_is_the_same_on_every_mesh(mesh, shallow, prompts, plain):
    limits = Limits(max_new_tokens=10)
    drafted = texts(shallow(mesh), prompts, limits, Draft("ddtree", 16))
    assert drafted == [text[:10] for text in plain]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["hgx-ib-16", "hgx-ib-16 replicas", "nvl36", "nvl72"])
@pytest.mark.parametrize("draft", [
    Draft("chain"), *(Draft("ddtree", n) for n in (1, 2, 7, 32, 64)), Draft("ddtree", 16, shared=True),
], ids=str)  # fmt: skip
def test_greedy_text_is_the_same_on_every_mesh_for_every_budget(mesh, draft, shallow, prompts, plain):
    assert texts(shallow(mesh), prompts, Limits(max_new_tokens=20), draft) == plain


@pytest.fixture(scope="module")
def told(shallow, prompts, plain):
    """Programs whose drafter knows the plain texts: shared, since its drafts are compiled into them."""
    table = np.zeros((len(prompts), 64), np.int32)
    for row, (prompt, answer) in enumerate(zip(prompts, plain, strict=True)):
        table[row, len(prompt) : len(prompt) + len(answer)] = answer
    return with_drafter(shallow(), Told(table))


def test_a_drafter_that_knows_the_answer_accepts_whole_blocks(shallow, prompts, plain, told, served):
    result = served(shallow(), told, prompts, Limits(max_new_tokens=20))
    assert result.texts == plain
    # One token from prefill, then 8 a round: 19 more take three, the last one cut.
    counts, count = result.last.counts, len(prompts)
    assert counts.rounds.tolist() == [3] * count
    assert counts.hits[:, :3].tolist() == [[3] * 3] * count
    assert counts.hits[:, 3:].tolist() == [[2] * 4] * count, "the table ends with the text"
    assert rounds_by_tokens(counts).tolist() == [0, 0, 0, count, 0, 0, 0, 0, 2 * count]


def test_a_drafter_that_knows_nothing_accepts_one_token_a_round(shallow, prompts, plain, told, served):
    """Told another prompt's text, at other positions."""
    order = [1, 2, 0]
    result = served(shallow(), told, [prompts[row] for row in order], Limits(max_new_tokens=12))
    assert result.texts == [plain[row][:12] for row in order]
    assert rounds_by_tokens(result.last.counts).tolist() == [0, 33, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("limit", [1, 2, 7, 8, 9, 10])
def test_max_new_tokens_is_exact_inside_an_accepted_path(limit, shallow, prompts, plain, told, served):
    result = served(shallow(), told, prompts, Limits(max_new_tokens=limit))
    assert result.texts == [text[:limit] for text in plain]


def test_a_stop_token_inside_an_accepted_path_ends_the_text_there(shallow, prompts, plain, told, served):
    stop = plain[0][4]  # the fourth draft of the first round
    result = served(shallow(), told, prompts, Limits(max_new_tokens=20), stop_ids=(stop,))
    end = plain[0].index(stop)  # tokens that the round emitted: prefill drew one of end + 1
    assert result.texts == [text[: text.index(stop) + 1] if stop in text else text for text in plain]
    assert result.last.counts.rounds[0] == 1
    assert result.last.counts.round_tokens[0].tolist() == [int(n < end) for n in range(8)]
    assert result.last.counts.hits[0].tolist() == [1] * 7


def test_acceptance_is_reported_over_all_rounds(shallow, prompts, plain, told, served):
    report = Report(3)
    report.add(served(shallow(), told, prompts, Limits(max_new_tokens=9)).last)
    found = report.as_dict()
    assert found["acceptance_length"] == 8
    assert found["acceptance_histogram"] == [0] * 8 + [3]
    assert found["draft_hits"] == [3] * 7
    assert found["draft_hit_rates"] == [1.0] * 7
    assert "8.00 tokens a round" in report.summary()
    assert report.details() == "1 round with 7.00 drafts hit in each"


@pytest.mark.parametrize("limit", [1, 2, 6])
def test_acceptance_length_counts_no_token_behind_the_limit(limit, shallow, prompts, told, served):
    report = Report(3)
    report.add(served(shallow(), told, prompts, Limits(max_new_tokens=limit)).last)
    assert report.acceptance_length == (None if limit == 1 else limit - 1)
    assert report.as_dict()["rounds"] == (limit > 1)


@pytest.mark.parametrize(
    ("mesh", "sampling"),
    [("local", HOT), *(pytest.param(*case, marks=pytest.mark.slow) for case in
     (("local", GREEDY), ("hgx-ib-16", GREEDY), ("hgx-ib-16", HOT)))],
)  # fmt: skip
def test_ids_beyond_the_tokenizer_are_neither_drawn_nor_drafted(mesh, sampling, shallow, prompts, served):
    """Padding rows of the head: the text is what a head without them gives, on every mesh, drafted or not."""
    engine, limits = shallow(mesh), Limits(max_new_tokens=12)
    known = sorted({token for text in texts(engine, prompts, limits, sampling=sampling) for token in text})[-3]
    found = []
    for draft in (PLAIN, Draft("ddtree", 16)):
        whole = engine.programs(draft)
        speculation = whole.speculation
        if speculation.drafter is not None:
            speculation = Speculation(dataclasses.replace(speculation.drafter, known_ids=known))
        programs = dataclasses.replace(whole, known_ids=known, speculation=speculation)
        found.append(served(engine, programs, prompts, limits, sampling=sampling).texts)
        shape = shape_of(programs, [*map(len, prompts)], [12] * len(prompts), limits)
        session = Session(programs, engine.parameters, shape)
        now = session.fill(prompts)
        tree = programs.parts[0](session.parameters, session.state, now)
        assert tree.tokens.max() < known
    assert found[0] == found[1]
    assert max(map(max, found[0])) < known
    if mesh != "local":
        local = dataclasses.replace(shallow().programs(), known_ids=known)
        assert served(shallow(), local, prompts, limits, sampling=sampling).texts == found[0]


def test_a_mask_id_that_the_target_really_emits_is_kept(shallow, prompts):
    engine, limits = shallow(), Limits(max_new_tokens=12)
    answers = texts(engine, prompts, limits)
    config = dataclasses.replace(engine.drafter.config, mask_token_id=answers[0][3])
    drafter = type(engine.drafter)(config)
    masked = dataclasses.replace(engine, drafter=drafter)
    assert texts(masked, prompts, limits, Draft("ddtree", 8)) == answers


@pytest.mark.parametrize("temperature", [pytest.param(t, marks=pytest.mark.slow) for t in (0.7, 1.0)] + [1.5])
def test_sampled_text_has_the_targets_law(temperature, shallow, forward, served):
    """Chi-square over the joint of the first three tokens, of 2,000 runs with drafts that are often accepted."""
    engine, runs = shallow(), 2000
    sampling = Sampling(temperature=temperature, top_k=3)
    prompt = [17, 250, 33, 90]

    def law(prefixes):
        ids = np.zeros((9, 8), np.int32)  # one shape, one compilation
        for row, prefix in enumerate(prefixes):
            ids[row, : len(prefix)] = prefix
        counts = np.array([len(prefix) for prefix in prefixes] + [1] * (9 - len(prefixes)), np.int32)
        logits = forward(engine, causal_rows(jnp.asarray(ids), jnp.zeros(9, jnp.int32), jnp.asarray(counts)))
        last = jnp.asarray(logits.logits[np.arange(9), counts - 1][: len(prefixes)])
        each = Samplings.of([sampling] * len(last))
        return np.asarray(jax.nn.softmax(filtered(last[:, None] / temperature, each)[:, 0], axis=-1))

    joint = {(): 1.0}
    for _ in range(3):
        p = law([prompt + list(path) for path in joint])
        joint = {
            (*path, int(token)): weight * row[token]
            for (path, weight), row in zip(joint.items(), p, strict=True)
            for token in np.flatnonzero(row)
        }
    # Drafts: for each depth the tokens likeliest there, so that paths of every length are accepted.
    marginal = np.zeros((2, engine.config.vocab_size))
    for path, weight in joint.items():
        for depth in (1, 2):
            marginal[depth - 1, path[depth]] += weight
    marginal[0, np.argsort(marginal[0])[-2]] = 0  # never drafted, so that some rounds accept nothing
    drafts = Fixed(jnp.log(jnp.asarray(marginal, jnp.float32)))
    programs, limits = with_drafter(engine, drafts), Limits(max_new_tokens=3, prefill_chunk=len(prompt))
    result = served(engine, programs, [prompt] * runs, limits, sampling=sampling, seed=5, samples=range(runs))
    drawn, last = result.texts, result.last
    hits = np.append(last.counts.hits.sum(0), 0)
    paths = np.append(last.counts.rounds.sum(), hits[:-1]) - hits
    assert (paths > runs / 50).all(), f"drafts must be accepted and rejected: {paths}"

    observed = dict.fromkeys(joint, 0)
    for text in drawn:
        observed[tuple(text)] += 1
    # Cells expected fewer than 5 times are pooled, as the chi-square approximation asks.
    cells = [(observed[path], weight * runs) for path, weight in joint.items()]
    common = [cell for cell in cells if cell[1] >= 5]
    rare = [cell for cell in cells if cell[1] < 5]
    if rare:
        common.append((sum(o for o, _ in rare), sum(e for _, e in rare)))
    chi_square = sum((o - e) ** 2 / e for o, e in common if e > 0)
    freedom = len(common) - 1
    # Mean + 4 standard deviations of a chi-square; a path accepted 10 % too often adds about 0.01 · runs = 20.
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom), (chi_square, freedom)


def test_sampled_text_is_the_plain_sampled_text(shallow, prompts):
    """Noise belongs to positions, so speculation does not even change the draw."""
    limits = Limits(max_new_tokens=12)
    expected = texts(shallow(), prompts, limits, sampling=HOT, seed=2)
    assert texts(shallow(), prompts, limits, Draft("ddtree", 16), HOT, seed=2) == expected


def test_synthetic_acceptance_has_the_wanted_mean(shallow, prompts, served):
    engine = shallow()
    programs = engine.programs(Draft("ddtree", 7, synthetic=3.25))
    last = served(engine, programs, prompts * 2, Limits(max_new_tokens=120)).last
    rounds, hits = last.counts.rounds.sum(), last.counts.hits.sum(0)
    assert hits[:2].tolist() == [rounds, rounds]
    assert hits[3:].tolist() == [0] * 4
    assert 1 + hits.sum() / rounds == pytest.approx(3.25, abs=0.1)


def test_the_compiled_rounds_never_leave_the_device_and_copy_no_cache(shallow):
    engine = shallow()
    programs = engine.programs(Draft("ddtree", 7))

    def compiled(tiles):
        state = jax.eval_shape(lambda: programs.start(slots=3, pages=3 * tiles, capacity=64 * tiles, shared=True))
        now = Dispatch(jax.ShapeDtypeStruct((3, tiles), jnp.int32), jax.ShapeDtypeStruct((3,), bool))
        parameters = {name: engine.parameters[name] for name in programs.needs}
        program = programs.decode(3, 8).lower(parameters, state, now, jnp.int32(8)).compile()
        pools = (state.cache, state.context_pages)
        shapes = state.cache[0].latent.shape, state.context_pages[0].keys.shape
        return program, shapes, sum(x.size * 4 for x in jax.tree.leaves(pools))

    small, _, small_bytes = compiled(128)
    program, shapes, cache_bytes = compiled(256)
    text = program.as_text()
    for forbidden in ("callback", "outfeed", "infeed", "send(", "recv("):
        assert forbidden not in text, forbidden
    for shape in shapes:
        array = f"f32[{','.join(map(str, shape))}]"
        assert array in text, "the pools must appear, or this test looks for the wrong thing"
        copies = [line for line in text.splitlines() if " copy(" in line and f"= {array}" in line]
        assert not copies, copies[:2]
    memory = program.memory_analysis()
    grown = memory.temp_size_in_bytes - small.memory_analysis().temp_size_in_bytes
    assert grown < (cache_bytes - small_bytes) / 100, "temporaries must not grow with the cache"
    assert memory.alias_size_in_bytes > cache_bytes, "the state is donated"


def test_drafting_without_a_drafter_is_refused(shallow):
    engine = dataclasses.replace(shallow(), drafter=None)
    with pytest.raises(ValueError, match="needs a drafter"):
        engine.programs(Draft("chain", 5))


@pytest.mark.parametrize(("field", "value"), [("budget", -1), ("synthetic", 0.5)])
def test_draft_settings_out_of_range_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        Draft(**{field: value})


@pytest.mark.parametrize("depth", [None, 0, -1])
def test_a_drafter_without_a_depth_is_refused(depth):
    drafter = Told(np.zeros((1, 1), np.int32))
    drafter.max_depth = depth
    with pytest.raises(ValueError, match=f"drafter Told has max_depth {depth}; give it"):
        Speculation(drafter)


def test_a_tree_deeper_than_its_drafter_says_is_refused(shallow, prompts, served):
    drafter = Fixed(jnp.zeros((3, 320)))
    drafter.max_depth = 2
    with pytest.raises(ValueError, match="drafter Fixed proposed a tree of depth 3, and its max_depth is 2"):
        served(shallow(), with_drafter(shallow(), drafter), prompts, Limits(max_new_tokens=4))


def test_an_unknown_drafter_is_refused_with_those_that_are_known(shallow):
    with pytest.raises(ValueError, match="speculation is 'lookup'; choose from none, chain, ddtree"):
        shallow().programs(Draft("lookup"))
