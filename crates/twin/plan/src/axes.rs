//! The axes of the search, each declared once: flag, values, key of the cluster file, names in outputs.
//!
//! The flags of the command, the checks of a question, the assignments of a candidate and the fields of its row are made
//! from [`AXES`]. A new axis is an entry of [`axes!`](self) and, if the search combines its values, a field of [`Shape`] or
//! [`Setting`].

use std::fmt;

use serde::{Deserialize, Serialize};
use slipstream_config::cluster::{Dtype, POLICIES};
use slipstream_report::table::number;

use crate::space::{Setting, Shape, WEIGHED};

/// A value on an axis.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// A whole number.
    Count(u32),
    /// A number.
    Number(f64),
    /// On or off.
    Switch(bool),
    /// A name.
    Word(String),
}

/// As in an assignment to a key of the cluster file.
impl fmt::Display for Value {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Count(value) => write!(to, "{value}"),
            Value::Number(value) => write!(to, "{value:?}"),
            Value::Switch(value) => write!(to, "{value}"),
            Value::Word(value) => to.write_str(value),
        }
    }
}

/// Values that an axis can have.
#[derive(Clone, Copy, Debug)]
pub enum Domain {
    /// Whole numbers from a least one to a largest one.
    Counts(u32, u32),
    /// Numbers from 0 to [`NUMBER_MAX`] in a unit, which may be empty.
    Numbers(&'static str),
    /// `off` and `on`, each with what it means.
    Switches([&'static str; 2]),
    /// Names, each with what it means.
    Names(&'static [(&'static str, &'static str)]),
    /// Names that a function checks; its error has all of them.
    Words(fn(&str) -> Result<(), String>),
}

/// Limit of numbers on an axis.
pub const NUMBER_MAX: f64 = 1e6;

/// An axis of the search.
#[derive(Clone, Copy, Debug)]
pub struct Axis {
    /// Name of the question's field and of Python's argument. The flag has hyphens instead ([`Axis::flag`]).
    pub name: &'static str,
    /// Meaning, as `--help` shows it.
    pub help: &'static str,
    /// Name of the values in `--help`.
    pub value_name: &'static str,
    /// Values that are searched by default, in the words of the flag. If there are none, the cluster file's value applies.
    pub default: &'static str,
    /// Values that it can have.
    pub domain: Domain,
    /// Key of the cluster file that a candidate sets.
    pub key: Option<&'static str>,
    /// Name in the list of what was searched; `None`: it is not in the list.
    pub label: Option<&'static str>,
    /// Name of a configuration's value in JSON.
    pub field: Option<&'static str>,
    /// Whether the search sets the key in every question, not only if the axis has values.
    pub always: bool,
    /// Whether 0 stands for a cluster without the table of the key.
    pub zero_is_none: bool,
    /// Value of a configuration; `None`: the cluster file's.
    pub of: fn(&Shape, &Setting) -> Option<Value>,
    /// Values of a question.
    pub values: fn(&Axes) -> Vec<Value>,
    /// Replaces the values of a question by texts in the words of a flag.
    parse: fn(&mut Axes, &[String]) -> Result<(), String>,
}

impl Axis {
    /// An axis that sets no key and has no value in a configuration.
    const NONE: Axis = Axis {
        name: "",
        help: "",
        value_name: "VALUES",
        default: "",
        domain: Domain::Numbers(""),
        key: None,
        label: None,
        field: None,
        always: false,
        zero_is_none: false,
        of: |_, _| None,
        values: |_| Vec::new(),
        parse: |_, _| Ok(()),
    };

    /// Name of the flag, without its hyphens in front.
    pub fn flag(&self) -> String {
        self.name.replace('_', "-")
    }

    /// Checks a text in the words of a flag.
    ///
    /// # Errors
    /// A message with the values that the axis can have.
    pub fn check_text(&self, text: &str) -> Result<(), String> {
        if text.trim().is_empty() {
            return Err(EMPTY.to_owned());
        }
        (self.parse)(&mut Axes::default(), &[text.to_owned()])?;
        match self.domain {
            Domain::Counts(least, most) => match text.parse::<u32>() {
                Ok(value) if (least..=most).contains(&value) => Ok(()),
                _ => Err(format!("{text} is not in {least}..={most}")),
            },
            Domain::Words(check) => check(text),
            _ => Ok(()),
        }
    }

    /// Checks a value of a question.
    ///
    /// # Errors
    /// A message that names the flag and the values that the axis can have.
    pub fn check(&self, value: &Value) -> Result<(), String> {
        let flag = self.flag();
        let unit = |unit: &str| {
            if unit.is_empty() {
                String::new()
            } else {
                format!(" {unit}")
            }
        };
        match (self.domain, value) {
            (Domain::Counts(least, most), Value::Count(value))
                if !(least..=most).contains(value) =>
            {
                Err(format!(
                    "--{flag} has {value}, but must be {least} to {most}"
                ))
            }
            (Domain::Numbers(of), Value::Number(value)) if !(0.0..=NUMBER_MAX).contains(value) => {
                let unit = unit(of);
                Err(format!(
                    "--{flag} has {value}, but must be 0 to 1,000,000{unit}"
                ))
            }
            (Domain::Words(_) | Domain::Names(_), Value::Word(word)) if word.trim().is_empty() => {
                Err(format!("--{flag}: {EMPTY}"))
            }
            (Domain::Words(check), Value::Word(word)) => {
                check(word).map_err(|error| format!("--{flag}: {error}"))
            }
            (Domain::Names(names), Value::Word(word))
                if !names.iter().any(|(name, _)| name == word) =>
            {
                let names: Vec<&str> = names.iter().map(|(name, _)| *name).collect();
                Err(format!(
                    "--{flag}: `{word}` is not a kind of {}; one of {}",
                    self.name,
                    names.join(", ")
                ))
            }
            _ => Ok(()),
        }
    }

    /// A value in the words of the output.
    fn shown(&self, value: &Value) -> String {
        match (self.domain, value) {
            (Domain::Numbers(""), Value::Number(value)) => number(*value),
            (Domain::Numbers(unit), Value::Number(value)) => format!("{value} {unit}"),
            (_, Value::Switch(value)) => if *value { "on" } else { "off" }.to_owned(),
            (_, value) => value.to_string(),
        }
    }
}

/// The fault of a list such as `a,,b`.
const EMPTY: &str = "a value is empty; leave out the comma that is too many";

/// A type of values.
trait Element: Sized {
    fn parse(text: &str) -> Result<Self, String>;
    fn value(&self) -> Value;
}

impl Element for u32 {
    fn parse(text: &str) -> Result<u32, String> {
        text.parse()
            .map_err(|error: std::num::ParseIntError| error.to_string())
    }

    fn value(&self) -> Value {
        Value::Count(*self)
    }
}

impl Element for f64 {
    fn parse(text: &str) -> Result<f64, String> {
        text.parse()
            .map_err(|error: std::num::ParseFloatError| error.to_string())
    }

    fn value(&self) -> Value {
        Value::Number(*self)
    }
}

impl Element for bool {
    fn parse(text: &str) -> Result<bool, String> {
        match text {
            "off" => Ok(false),
            "on" => Ok(true),
            _ => Err(format!("`{text}` is neither off nor on")),
        }
    }

    fn value(&self) -> Value {
        Value::Switch(*self)
    }
}

impl Element for String {
    fn parse(text: &str) -> Result<String, String> {
        Ok(text.to_owned())
    }

    fn value(&self) -> Value {
        Value::Word(self.clone())
    }
}

/// Declares the axes: the fields of [`Axes`], and [`AXES`].
macro_rules! axes {
    ($($name:ident: $type:ty, $help:literal, { $($about:tt)* })+) => {
        /// Values to search on each axis. No value keeps the cluster file's.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct Axes {
            $(#[doc = $help] pub $name: Vec<$type>,)+
        }

        /// The axes, in the order of `--help`.
        pub static AXES: &[Axis] = &[$(Axis {
            name: stringify!($name),
            help: $help,
            values: |axes| axes.$name.iter().map(Element::value).collect(),
            parse: |axes, texts| {
                let parsed: Result<Vec<$type>, String> =
                    texts.iter().map(|text| Element::parse(text)).collect();
                axes.$name = parsed?;
                Ok(())
            },
            $($about)*
        }),+];

        impl Axes {
            /// No value on any axis.
            const NONE: Axes = Axes { $($name: Vec::new(),)+ };
        }
    };
}

axes! {
    gpus: String, "GPUs to choose from: presets (slipstream presets), or [gpu.NAME] of the cluster file", {
        value_name: "GPUS",
        default: "h100-sxm",
        // What exists depends on the cluster file.
        domain: Domain::Words(|_| Ok(())),
        key: Some("engine.timing.gpu"),
        label: Some("GPUs"),
        field: Some("gpu"),
        always: true,
        of: |shape, _| Some(Value::Word(shape.gpu.clone())),
        ..Axis::NONE
    }
    tensor_parallel: u32, "GPUs of a worker, or of each rank of one", {
        value_name: "SIZES",
        default: "1,2,4,8",
        domain: Domain::Counts(1, 1024),
        key: Some("engine.tensor_parallel_size"),
        label: Some("tensor parallel"),
        field: Some("tensor_parallel_size"),
        always: true,
        of: |shape, _| Some(Value::Count(shape.tensor_parallel)),
        ..Axis::NONE
    }
    pipeline_parallel: u32, "Stages of a worker, or of each rank of one, with as many GPUs each [default: engine.pipeline_parallel_size]", {
        value_name: "SIZES",
        domain: Domain::Counts(1, 1024),
        key: Some("engine.pipeline_parallel_size"),
        label: Some("pipeline parallel"),
        field: Some("pipeline_parallel_size"),
        of: |shape, _| shape.pipeline_parallel.map(Value::Count),
        ..Axis::NONE
    }
    data_parallel: u32, "Ranks of a worker (attention data parallelism) [default: engine.data_parallel_size]", {
        value_name: "SIZES",
        domain: Domain::Counts(1, 1024),
        key: Some("engine.data_parallel_size"),
        label: Some("data parallel"),
        field: Some("data_parallel_size"),
        of: |shape, _| shape.data_parallel.map(Value::Count),
        ..Axis::NONE
    }
    expert_parallel: bool, "Whether each GPU of a worker has whole experts: off, on [default: engine.enable_expert_parallel]", {
        domain: Domain::Switches(["Every GPU has a part of every expert", "Each GPU has whole experts"]),
        key: Some("engine.enable_expert_parallel"),
        label: Some("expert parallel"),
        field: Some("expert_parallel"),
        of: |shape, _| shape.expert_parallel.map(Value::Switch),
        ..Axis::NONE
    }
    host_memory: f64, "Host memory of a rank for KV blocks, GiB; needs engine.host_tier.bytes_per_s: 0,256 [default: engine.host_tier.gib]", {
        value_name: "GIB",
        domain: Domain::Numbers("GiB"),
        key: Some("engine.host_tier.gib"),
        label: Some("host memory"),
        field: Some("host_memory_gib"),
        zero_is_none: true,
        of: |shape, _| shape.host_gib.map(Value::Number),
        ..Axis::NONE
    }
    speculation: u32, "Tokens of a draft (speculative decoding): 0,1,3; needs `method` and `acceptance` of [engine.speculation] [default: the cluster file's]", {
        value_name: "TOKENS",
        domain: Domain::Counts(0, 32),
        key: Some("engine.speculation.num_speculative_tokens"),
        label: Some("tokens of a draft"),
        field: Some("draft_tokens"),
        zero_is_none: true,
        of: |shape, _| shape.draft_tokens.map(Value::Count),
        ..Axis::NONE
    }
    precision: String, "Formats of the weights: bf16, fp8, int8, int4, nvfp4, mxfp4 [default: the checkpoint's, and fp8 for bf16]", {
        value_name: "FORMATS",
        domain: Domain::Words(|text| precision(text).map(|_| ())),
        key: Some("engine.timing.dtype"),
        label: Some("weights"),
        field: Some("dtype"),
        always: true,
        of: |shape, _| Some(Value::Word(shape.dtype.name().to_owned())),
        ..Axis::NONE
    }
    kv_cache_dtype: String, "Formats of the KV cache: auto (the checkpoint's), bf16, fp8", {
        value_name: "FORMATS",
        default: "auto",
        domain: Domain::Words(|text| kv_cache_dtype(text).map(|_| ())),
        key: Some("engine.kv_cache_dtype"),
        label: Some("KV cache"),
        field: Some("kv_cache_dtype"),
        always: true,
        of: |shape, _| shape.kv_cache.map(|dtype| Value::Word(dtype.name().to_owned())),
        ..Axis::NONE
    }
    serving: String, "Workers that compute prompts and answers, or workers for each", {
        value_name: "KINDS",
        default: "aggregated,disaggregated",
        domain: Domain::Names(&[
            ("aggregated", "Each worker computes prompts and answers"),
            (DISAGGREGATED, "Prefill workers and decode workers"),
        ]),
        ..Axis::NONE
    }
    max_num_seqs: u32, "Values of engine.max_num_seqs; the first one is the base", {
        default: "256,64,1024",
        domain: Domain::Counts(1, 65_536),
        key: Some("engine.max_num_seqs"),
        label: Some("max_num_seqs"),
        field: Some("max_num_seqs"),
        always: true,
        of: |_, setting| Some(Value::Count(setting.max_num_seqs)),
        ..Axis::NONE
    }
    max_num_batched_tokens: u32, "Values of engine.max_num_batched_tokens; the first one is the base", {
        default: "8192,2048,16384",
        domain: Domain::Counts(1, 1 << 24),
        key: Some("engine.max_num_batched_tokens"),
        label: Some("max_num_batched_tokens"),
        field: Some("max_num_batched_tokens"),
        always: true,
        of: |_, setting| Some(Value::Count(setting.max_num_batched_tokens)),
        ..Axis::NONE
    }
    policies: String, "Values of router.policy; the first one is the base", {
        value_name: "POLICIES",
        default: "kv,power_of_two,round_robin",
        domain: Domain::Words(policy),
        key: Some("router.policy"),
        label: Some("policies"),
        field: Some("policy"),
        always: true,
        of: |_, setting| Some(Value::Word(setting.policy.clone())),
        ..Axis::NONE
    }
    prefill_weights: f64, "Values of router.prefill_weight for policy kv; the first one is the base [default: router.prefill_weight]", {
        value_name: "WEIGHTS",
        key: Some("router.prefill_weight"),
        label: Some("prefill weights"),
        field: Some("prefill_weight"),
        of: |_, setting| setting.prefill_weight.map(Value::Number),
        ..Axis::NONE
    }
    temperatures: f64, "Values of router.temperature for policy kv; the first one is the base [default: router.temperature]", {
        key: Some("router.temperature"),
        label: Some("temperatures"),
        field: Some("temperature"),
        of: |_, setting| setting.temperature.map(Value::Number),
        ..Axis::NONE
    }
    autoscale_min: u32, "Fewest workers with the cluster file's `[autoscale]`, tried on the answer and the rows next to it: 1,2,4", {
        value_name: "WORKERS",
        domain: Domain::Counts(1, 65_535),
        key: Some("autoscale.workers_min"),
        label: Some("fewest workers with [autoscale]"),
        ..Axis::NONE
    }
}

/// Prefill and decode have workers of their own.
const DISAGGREGATED: &str = "disaggregated";

impl Default for Axes {
    fn default() -> Axes {
        let mut axes = Axes::NONE;
        for axis in AXES {
            let texts = axis.default.split(',').filter(|text| !text.is_empty());
            let texts: Vec<String> = texts.map(str::to_owned).collect();
            axes.set(axis, &texts)
                .expect("defaults are values of their axis");
        }
        axes
    }
}

impl Axes {
    /// Replaces the values of an axis by texts in the words of a flag.
    ///
    /// # Errors
    /// A message about a text that is no value of the axis.
    pub fn set(&mut self, axis: &Axis, texts: &[String]) -> Result<(), String> {
        (axis.parse)(self, texts)
    }

    /// Checks each value, and that none is there twice.
    ///
    /// # Errors
    /// A message that names the flag.
    pub fn check(&self) -> Result<(), String> {
        for axis in AXES {
            let values = (axis.values)(self);
            if values.is_empty() && !axis.default.is_empty() {
                return Err(format!("--{} has no value", axis.flag()));
            }
            values.iter().try_for_each(|value| axis.check(value))?;
            if let Some(value) = repeated(&values) {
                let (flag, value) = (axis.flag(), axis.shown(value));
                return Err(format!("--{flag} has {value} twice; keep one"));
            }
        }
        let weighed = [
            ("prefill-weights", &self.prefill_weights),
            ("temperatures", &self.temperatures),
        ];
        for (flag, values) in weighed {
            if !values.is_empty() && !self.policies.iter().any(|policy| policy == WEIGHED) {
                return Err(format!(
                    "--{flag} is for the policy {WEIGHED}, which --policies does not have; add it, or leave --{flag} out"
                ));
            }
        }
        self.check_tokens_per_step()
    }

    /// Checks that a step has room for a token of every sequence, as vLLM requires, in some combination of the values.
    fn check_tokens_per_step(&self) -> Result<(), String> {
        let tokens = self.max_num_batched_tokens.iter().max();
        let seqs = self.max_num_seqs.iter().min();
        match (tokens, seqs) {
            (Some(tokens), Some(seqs)) if tokens < seqs => Err(format!(
                "--max-num-batched-tokens has at most {tokens}, but needs at least {seqs}, the least of --max-num-seqs: each step has a \
                 token of every sequence; raise it, or lower --max-num-seqs"
            )),
            _ => Ok(()),
        }
    }

    /// Keys of the cluster file that a search of these values sets, each with the flag that restricts it.
    pub fn keys(&self) -> Vec<(&'static str, String)> {
        let is_set = |axis: &&Axis| axis.always || !(axis.values)(self).is_empty();
        let keys = AXES.iter().filter(is_set);
        keys.filter_map(|axis| Some((axis.key?, format!("--{}", axis.flag()))))
            .collect()
    }

    /// Whether the search sets a key.
    pub fn sets_key(&self, key: &str) -> bool {
        self.keys().iter().any(|(of, _)| *of == key)
    }

    /// The axes with their values, in words: `GPUs h100-sxm; tensor parallel 1, 2`. `weights`: the formats that are searched.
    pub fn describe(&self, weights: &[Dtype]) -> String {
        let (always, others): (Vec<&Axis>, Vec<&Axis>) = AXES.iter().partition(|axis| axis.always);
        let with_label = always.into_iter().chain(others);
        let list = |axis: &Axis| {
            let mut values = (axis.values)(self);
            if axis.name == "precision" {
                let names = weights.iter().map(|dtype| dtype.name().to_owned());
                values = names.map(Value::Word).collect();
            }
            let shown: Vec<String> = values.iter().map(|value| axis.shown(value)).collect();
            let label = axis.label.filter(|_| !shown.is_empty())?;
            Some(format!("{label} {}", shown.join(", ")))
        };
        let lists: Vec<String> = with_label.filter_map(list).collect();
        lists.join("; ")
    }

    /// Formats of the KV cache.
    pub fn kv_caches(&self) -> Vec<Option<Dtype>> {
        let formats = self.kv_cache_dtype.iter();
        formats
            .filter_map(|text| kv_cache_dtype(text).ok())
            .collect()
    }

    /// Formats of the weights; none: the checkpoint's.
    pub fn precisions(&self) -> Vec<Dtype> {
        let formats = self.precision.iter();
        formats.filter_map(|text| precision(text).ok()).collect()
    }

    /// Whether prefill and decode have workers of their own, of each kind of serving.
    pub fn disaggregated(&self) -> impl Iterator<Item = bool> {
        self.serving.iter().map(|kind| kind == DISAGGREGATED)
    }
}

/// The first value that is equal to one before it.
pub fn repeated<T: PartialEq>(values: &[T]) -> Option<&T> {
    let is_repeated = |(at, value): &(usize, &T)| values[..*at].contains(value);
    values
        .iter()
        .enumerate()
        .find(is_repeated)
        .map(|(_, value)| value)
}

/// The assignments `KEY=VALUE` of a configuration, without its pools.
pub fn assignments(shape: &Shape, setting: &Setting) -> Vec<String> {
    let is_none = |value: &Value| matches!(value, Value::Count(0) | Value::Number(0.0));
    let assign = |axis: &Axis| {
        let value = (axis.of)(shape, setting)?;
        let is_left_out = axis.zero_is_none && is_none(&value);
        Some(format!("{}={value}", axis.key?)).filter(|_| !is_left_out)
    };
    AXES.iter().filter_map(assign).collect()
}

/// The format of weights that a text names.
fn precision(text: &str) -> Result<Dtype, String> {
    let names = || Dtype::ALL.map(Dtype::name).join(", ");
    Dtype::ALL
        .into_iter()
        .find(|dtype| dtype.name() == text)
        .ok_or_else(|| format!("`{text}` is not a format of weights; one of {}", names()))
}

/// The format of the KV cache that a text names; `None`: the checkpoint's.
fn kv_cache_dtype(text: &str) -> Result<Option<Dtype>, String> {
    match text {
        "auto" => Ok(None),
        "bf16" => Ok(Some(Dtype::Bf16)),
        "fp8" => Ok(Some(Dtype::Fp8)),
        _ => Err(format!(
            "`{text}` is not a format of the KV cache; one of auto, bf16, fp8"
        )),
    }
}

/// Checks the name of a routing policy.
fn policy(text: &str) -> Result<(), String> {
    let names = POLICIES.iter().map(|(name, _)| *name);
    let names: Vec<&str> = names.filter(|name| *name != "direct").collect();
    if names.contains(&text) {
        Ok(())
    } else {
        Err(format!(
            "`{text}` is not a policy; one of {}",
            names.join(", ")
        ))
    }
}
