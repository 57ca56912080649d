//! Sessions: `[[class]]` or the top level, `[[prefix]]`, and `[session]`.

use slipstream_base::slo::Slo;

use super::dist::{Dist, read_dists};
use crate::doc::{Key, Table, optional, required, section, value};

/// Most images of a prompt.
pub const IMAGES_MAX: u32 = 256;
/// Most tokens of an image.
pub const IMAGE_TOKENS_MAX: u32 = 65_536;

/// Limit of a prefix level's branches: each has an entry in a table of popularities.
const BRANCHES_MAX: u32 = 1_000_000;
/// Longest prompt or answer, tokens: far beyond any model, and sums stay within 32 bits.
const TOKENS_MAX: f64 = 100_000_000.0;
/// Limit of a session's turns: a request's number has 12 bits for them.
const TURNS_MAX: f64 = 4_096.0;
/// Longest think time, s: a year.
const THINK_TIME_S_MAX: f64 = 31_536_000.0;

/// A number of tokens, or a distribution of such.
fn tokens(default: f64) -> Key<f64> {
    value(default)
        .within(1.0..=TOKENS_MAX)
        .unit("tokens, distribution")
}

section! {
    /// A kind of session: `[[class]]`, or the top level of a file that has only one.
    pub struct Class, keys ClassKeys of "", read by hand {
        /// Name in reports. Default `default`.
        field name: String = "default".into();
        /// Share of sessions, relative to the other classes. Default 1.
        field weight: f64 = 1.0;
        /// Tokens of a session's first prompt, including the shared prefix. Default 1,024.
        field isl: Dist = Dist::Exact(ClassKeys::isl().default());
        /// A session's first prompt, **shared prefix included**.
        ///
        /// At least one token longer than the shared prefix.
        key isl: f64 = tokens(1024.0);
        /// Tokens of an answer: the request's `max_tokens`. Default 128.
        field osl: Dist = Dist::Exact(ClassKeys::osl().default());
        /// Length of an answer: `max_tokens`.
        ///
        /// Low: decoding looks cheap, and the load is mostly prefill.
        key osl: f64 = tokens(128.0);
        /// Generate exactly `osl` tokens.
        ///
        /// False: answers end where the model ends them, and runs differ in their output tokens.
        ignore_eos: bool = value(true);
        /// Sent as `priority`, if not 0. Default 0.
        field priority: i32 = 0;
        /// Sent as `priority`; under priority scheduling, lower runs first.
        key priority: i64 = value(0).within(i64::from(i32::MIN)..=i64::from(i32::MAX));
        /// For a simulated cluster of [several models](twin.md#several-models): each session uses one of them.
        models: Vec<String> = value(Vec::new())
            .check(|names| are_names_once(names), "up to 1,024 names of 1 to 256 bytes, each once").with_description("list of names").with_default_text("none");
        /// Share of sessions of each of `models`, relative to the others.
        model_weights: Vec<f64> = value(Vec::new())
            .check(|weights| are_weights(weights), "a list of numbers of 0 to 1e9, at least one of them above 0")
            .with_description("list of numbers").note("with `models`").with_default_text("equal");
        /// LoRA adapters: each session uses one, sent as `model` ([engine-model.md](engine-model.md#lora-adapters)).
        /// Traces have none.
        adapters: Vec<String> = value(Vec::new())
            .check(|names| are_names(names), "up to 1,024 names of 1 to 256 bytes").with_description("list of names").with_default_text("none");
        /// Popularity of adapter `k` (from 0) is `(k + 1)^-adapter_skew` (Zipf's law); 0: equal.
        adapter_skew: f64 = value(0.0).within(0.0..=10.0);
        /// Images in each session's first prompt, in addition to `isl`. Default 0.
        field images: Dist = Dist::Exact(ClassKeys::images_per_request().default());
        /// Images in a session's first prompt, behind the shared prefix; later turns contain them too. For simulation
        /// only ([engine-model.md](engine-model.md#images)). Traces have none.
        key images_per_request: f64 = value(0.0).within(0.0..=f64::from(IMAGES_MAX)).unit("images, distribution");
        /// Tokens that each of them takes in the prompt. Default 1,024.
        field image_tokens: Dist = Dist::Exact(ClassKeys::image_tokens().default());
        /// Tokens of each image, the same for all of a session; in addition to `isl`.
        key image_tokens: f64 = value(1024.0).within(1.0..=f64::from(IMAGE_TOKENS_MAX)).unit("tokens, distribution");
        /// Shared prefixes, outermost first; empty: nothing is shared.
        field prefix: Vec<PrefixLevel> = Vec::new();
        /// Multi-turn sessions.
        field session: SessionShape = SessionShape::default();
        /// Objectives of its requests, for goodput; `None`: those of the run.
        field slo: Option<Slo> = None;
        /// Objectives of its requests, such as `"ttft=1s,itl=50ms"`; the flag `--slo` replaces them, in every class.
        key slo?: String = optional().with_description("`METRIC=TIME,…`").with_default_text("those of the run");
    }
}

section! {
    keys ListedClassKeys of "class" {
        /// Name in messages.
        key name?: String = optional().with_description("text").with_default_text("`class-0`, …");
        /// Share of sessions, relative to the other classes.
        key weight: f64 = value(1.0).check(|w| *w >= 0.0, "0 or more").with_description("0 or more");
    }
}

section! {
    /// `[[prefix]]`: one level of a tree of shared prefixes. A session follows one path from the root,
    /// and its prompt begins with the texts along it.
    pub struct PrefixLevel, keys PrefixKeys of "prefix", read by hand {
        /// Number of texts below each text of the level above.
        ///
        /// Low: almost all sessions share the text. High: few do.
        branches: u32 = required("set the number of texts of this level: `branches = 8`", 1)
            .within(1..=BRANCHES_MAX).with_default_text("required");
        /// Tokens of each text, at least 1; the same for all sessions that share the text.
        field tokens: Dist = Dist::Exact(PrefixKeys::tokens().default());
        /// Length of each text; the same for all sessions that share it.
        key tokens: f64 = tokens(256.0);
        /// Popularity of branch `k` (from 0) is `(k + 1)^-skew` (Zipf's law); 0: equal.
        skew: f64 = value(0.0).within(0.0..=10.0);
    }
}

section! {
    /// `[session]`: consecutive turns, each with the whole conversation so far in its prompt.
    pub struct SessionShape, keys SessionKeys of "session", read by hand {
        /// Number of turns. Default 1.
        field turns: Dist = Dist::Exact(SessionKeys::turns().default());
        /// Turns per session.
        key turns: f64 = value(1.0).within(1.0..=TURNS_MAX).unit("turns, distribution");
        /// Think time: from an answer's end until the next turn is due, s of workload time. Default 0.
        field think_time_s: Dist = Dist::Exact(SessionKeys::think_time_s().default());
        /// From an answer's last token until the next turn is due.
        ///
        /// Low: the cache still holds the conversation. High: it may be evicted by then.
        key think_time_s: f64 = value(0.0).within(0.0..=THINK_TIME_S_MAX).unit("s, distribution");
        /// New user text of every turn after the first, tokens. Default 64.
        field user_tokens: Dist = Dist::Exact(SessionKeys::user_tokens().default());
        /// New user text of each later turn.
        key user_tokens: f64 = tokens(64.0);
        /// A session ends before a turn whose prompt would exceed this length, with answers counted at full `osl`.
        isl_max?: u32 = optional().at_least(1).unit("tokens");
    }
}

/// Refuses the keys of a class at the top level.
pub(super) fn refuse_class_keys(root: &Table<'_>, why: &str) {
    for key in ClassKeys::NAMES
        .iter()
        .copied()
        .chain(["prefix", "session"])
    {
        root.refuse(key, &format!("is not used: {why}"), "remove it");
    }
}

/// The classes of a file without a trace.
pub(super) fn read_classes(root: &Table<'_>) -> Vec<Class> {
    if !root.has("class") {
        return vec![read_class(root, Class::default().name, 1.0)];
    }
    refuse_class_keys(root, "there are `[[class]]` tables, each with its own");
    let classes = root.array("class", |index, t| {
        let name = ListedClassKeys::name()
            .field(t)
            .or(format!("class-{index}"));
        let weight = ListedClassKeys::weight().read(t);
        read_class(t, name, weight)
    });
    if !classes.is_empty() && classes.iter().all(|c| c.weight == 0.0) {
        root.error(
            "class",
            "every `[[class]]` has weight 0",
            "give one of them a weight above 0",
        );
    }
    if classes.is_empty() {
        vec![Class::default()]
    } else {
        classes
    }
}

fn read_class(t: &Table<'_>, name: String, weight: f64) -> Class {
    let ignore_eos = ClassKeys::ignore_eos().read(t);
    let priority = i32::try_from(ClassKeys::priority().read(t)).expect("it is within its range");
    let (models, model_weights) = read_models(t);
    let adapters = ClassKeys::adapters().read(t);
    let adapter_skew = ClassKeys::adapter_skew().read(t);
    let slo = read_slo(t);
    let [isl, osl, images, image_tokens] = read_dists(
        t,
        &[
            ClassKeys::isl(),
            ClassKeys::osl(),
            ClassKeys::images_per_request(),
            ClassKeys::image_tokens(),
        ],
    );
    let class = Class {
        name,
        weight,
        isl,
        osl,
        ignore_eos,
        priority,
        models,
        model_weights,
        adapters,
        adapter_skew,
        images,
        image_tokens,
        slo,
        prefix: t.array("prefix", |_, level| read_prefix(level)),
        session: t.table("session", read_session),
    };
    let shared: f64 = class.prefix.iter().map(|level| level.tokens.min()).sum();
    if shared >= class.isl.max() {
        t.error(
            "isl",
            format!(
                "`isl` is at most {} tokens, but the shared prefix alone has {shared} or more",
                class.isl.max()
            ),
            "increase `isl`, which is the length of the whole prompt, or shorten the prefix",
        );
    }
    class
}

fn read_slo(t: &Table<'_>) -> Option<Slo> {
    let text = ClassKeys::slo().read(t)?;
    let wrong = |error: String| {
        t.error(
            "slo",
            format!("`slo`: {error}"),
            "write for example `slo = \"ttft=1s,itl=50ms\"`",
        );
    };
    text.parse().map_err(wrong).ok()
}

fn read_prefix(t: &Table<'_>) -> PrefixLevel {
    let branches = PrefixKeys::branches().read(t);
    let skew = PrefixKeys::skew().read(t);
    let [tokens] = read_dists(t, &[PrefixKeys::tokens()]);
    PrefixLevel {
        branches,
        tokens,
        skew,
    }
}

fn read_session(t: &Table<'_>) -> SessionShape {
    let isl_max = SessionKeys::isl_max().read(t);
    let [turns, think_time_s, user_tokens] = read_dists(
        t,
        &[
            SessionKeys::turns(),
            SessionKeys::think_time_s(),
            SessionKeys::user_tokens(),
        ],
    );
    SessionShape {
        turns,
        think_time_s,
        user_tokens,
        isl_max,
    }
}

fn is_name(name: &str) -> bool {
    !name.is_empty() && name.len() <= 256
}

fn are_names(names: &[String]) -> bool {
    names.len() <= 1024 && names.iter().all(|name| is_name(name))
}

fn are_names_once(names: &[String]) -> bool {
    let apart = (1..names.len()).all(|at| !names[..at].contains(&names[at]));
    are_names(names) && apart
}

fn are_weights(weights: &[f64]) -> bool {
    let sound = |w: &f64| (0.0..=1e9).contains(w);
    weights.iter().all(sound) && weights.iter().any(|w| *w > 0.0)
}

/// The models of a class, and the weight of each.
fn read_models(t: &Table<'_>) -> (Vec<String>, Vec<f64>) {
    let models = ClassKeys::models().read(t);
    if models.is_empty() {
        t.unused("model_weights", "models", "there are no `models`");
        return (models, Vec::new());
    }
    let equal = vec![1.0; models.len()];
    let weights = ClassKeys::model_weights().field(t).or(equal.clone());
    if weights.len() != models.len() {
        t.error(
            "model_weights",
            format!(
                "`model_weights` has {} numbers, but `models` has {} names",
                weights.len(),
                models.len()
            ),
            "give each model one weight",
        );
        return (models, equal);
    }
    (models, weights)
}
