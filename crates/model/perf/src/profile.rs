//! Fitted values, as data: physical parameters, residual coefficients, error bands.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::OnceLock;

use slipstream_base::width::nearest_f32;
use thiserror::Error;

use crate::deployment::Framework;

/// Parameters that all frameworks share: name, prior, standard deviation of its logarithm, meaning.
pub(crate) const SHARED: &[(&str, f64, f64, &str)] = &[
    (
        "gemm_bf16",
        0.75,
        0.3,
        "share of the BF16 peak that dense matrix products reach",
    ),
    ("gemm_fp8", 0.60, 0.5, "the same in FP8"),
    ("gemm_fp4", 0.50, 0.5, "the same in FP4"),
    (
        "gemm_memory",
        0.85,
        0.15,
        "share of the memory bandwidth at which dense weights are read",
    ),
    (
        "expert_bf16",
        0.60,
        0.5,
        "share of the BF16 peak that grouped products of experts reach",
    ),
    ("expert_fp8", 0.40, 0.5, "the same in FP8"),
    ("expert_fp4", 0.35, 0.5, "the same in FP4"),
    (
        "expert_memory",
        0.70,
        0.25,
        "share of the memory bandwidth at which experts are read",
    ),
    (
        "expert_tile",
        32.0,
        0.7,
        "rows of arithmetic that each touched expert costs beyond its tokens",
    ),
    (
        "weight_only",
        0.70,
        0.3,
        "share of that efficiency if weights are unpacked to 16 bits first",
    ),
    (
        "stream_memory",
        0.85,
        0.15,
        "share of the memory bandwidth of attention and element-wise kernels",
    ),
    (
        "attention_compute",
        0.50,
        0.3,
        "share of the BF16 peak that attention over prompts reaches",
    ),
    (
        "imbalance",
        0.30,
        0.5,
        "work of the busiest group of experts beyond the mean",
    ),
    ("reduce_us", 8.0, 0.5, "latency of an all-reduce, us"),
    (
        "link",
        0.60,
        0.3,
        "share of the link bandwidth that collectives reach",
    ),
    (
        "exchange_us",
        8.0,
        0.5,
        "latency of an exchange between experts' groups per doubling, us",
    ),
    (
        "hopper",
        1.20,
        0.5,
        "overhead of a layer on Hopper, of that on Blackwell",
    ),
    (
        "latent_us",
        8.0,
        0.5,
        "overhead of a layer with latent attention beyond others, us",
    ),
    (
        "linear_us",
        15.0,
        0.5,
        "overhead of a layer with linear attention beyond others, us",
    ),
    (
        "quantize_us",
        3.0,
        0.7,
        "overhead of each product of a layer whose activations are quantized first, us",
    ),
    (
        "norm_us",
        4.0,
        0.7,
        "overhead of a layer that normalizes queries and keys, us",
    ),
    (
        "routing_skew",
        0.8,
        0.3,
        "tokens with uniform routing that touch as many experts as one real token",
    ),
    (
        "split_api_ms",
        50.0,
        0.5,
        "TTFT that a transfer of keys and values adds, ms",
    ),
    (
        "split_prefill",
        1.20,
        0.5,
        "time of a prompt on a prefill worker, of the model's",
    ),
    (
        "split_queue",
        1.00,
        0.5,
        "share of the fluid queue before prefill workers that is seen",
    ),
    (
        "split_decode",
        1.00,
        0.2,
        "step time of a decode worker, of the model's",
    ),
    (
        "split_burst",
        1.00,
        0.5,
        "weight of the first burst of requests, disaggregated",
    ),
];

/// Parameters that each framework has of its own.
pub(crate) const OWN: &[(&str, f64, f64, &str)] = &[
    ("layer_us", 25.0, 0.5, "overhead of a layer, us"),
    (
        "expert_layer_us",
        25.0,
        0.5,
        "overhead of a layer with experts beyond others, us",
    ),
    ("step_ms", 1.0, 0.8, "overhead of a step, ms"),
    (
        "sequence_us",
        10.0,
        0.8,
        "overhead of a step per sequence, us",
    ),
    (
        "api_ms",
        20.0,
        0.8,
        "server, tokenizer and hops before the first step, ms",
    ),
    (
        "api_prompt_token_us",
        4.0,
        0.8,
        "the same per token of the prompt, us",
    ),
    (
        "api_sequence_ms",
        0.3,
        0.8,
        "the same per request under way, ms",
    ),
    (
        "lag_steps",
        1.0,
        0.7,
        "steps from a request's arrival at the engine to its first token, besides its prompt",
    ),
    ("queue", 1.0, 0.8, "weight of the queue of prompts"),
    ("burst", 1.0, 0.8, "weight of the first burst of requests"),
    (
        "interference",
        1.0,
        0.5,
        "share of other requests' prompts that a decode waits for",
    ),
];

pub(crate) const COUNT: usize = SHARED.len() + 3 * OWN.len();

/// Physical parameters, all positive.
#[derive(Clone, Debug, PartialEq)]
pub struct Params {
    pub(crate) values: Vec<f64>,
}

impl Params {
    /// The values that a fit starts from.
    pub fn prior() -> Params {
        let shared = SHARED.iter().map(|p| p.1);
        let own = Framework::ALL.iter().flat_map(|_| OWN.iter().map(|p| p.1));
        Params {
            values: shared.chain(own).collect(),
        }
    }

    /// Standard deviation of the logarithm of each parameter around its prior.
    pub(crate) fn spread() -> Vec<f64> {
        let shared = SHARED.iter().map(|p| p.2);
        let own = Framework::ALL.iter().flat_map(|_| OWN.iter().map(|p| p.2));
        shared.chain(own).collect()
    }

    /// Names with their values: `gemm_bf16`, `vllm.layer_us`.
    pub fn named(&self) -> impl Iterator<Item = (String, f64, &'static str)> {
        let shared = SHARED.iter().map(|p| (p.0.to_owned(), p.3));
        let own = Framework::ALL
            .iter()
            .flat_map(|f| OWN.iter().map(|p| (format!("{}.{}", f.name(), p.0), p.3)));
        let values = self.values.clone();
        shared
            .chain(own)
            .zip(values)
            .map(|((name, meaning), value)| (name, value, meaning))
    }

    pub(crate) fn shared(&self, at: usize) -> f64 {
        self.values[at]
    }

    pub(crate) fn own(&self, framework: Framework, at: usize) -> f64 {
        self.values[SHARED.len() + framework as usize * OWN.len() + at]
    }
}

/// Place of the parameter `name` in [`SHARED`] or [`OWN`]; evaluated at compile time.
pub(crate) const fn place(name: &str, list: &[(&str, f64, f64, &str)]) -> usize {
    let name = name.as_bytes();
    let mut at = 0;
    loop {
        let other = list[at].0.as_bytes();
        let mut i = 0;
        while i < name.len() && i < other.len() && name[i] == other[i] {
            i += 1;
        }
        if i == name.len() && i == other.len() {
            return at;
        }
        at += 1;
    }
}

/// Value of a parameter that all frameworks share.
macro_rules! shared {
    ($params:expr, $name:literal) => {
        $params.shared(const { $crate::profile::place($name, $crate::profile::SHARED) })
    };
}

/// Value of a parameter of a framework's own.
macro_rules! own {
    ($params:expr, $framework:expr, $name:literal) => {
        $params.own(
            $framework,
            const { $crate::profile::place($name, $crate::profile::OWN) },
        )
    };
}

pub(crate) use {own, shared};

/// Which held-out fold resembles a deployment: how far it is from what the profile was fitted to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Distance {
    /// Model, GPU, framework, precision and parallel sizes were measured, at loads around this one.
    Near,
    /// The same, but at other loads alone.
    Load,
    /// Model, GPU and framework were, not in this combination.
    Combination,
    /// The model was never measured.
    Model,
    /// The GPU was never measured.
    Gpu,
    /// The framework was never measured.
    Framework,
}

impl Distance {
    /// All, from near to far.
    pub const ALL: [Distance; 6] = [
        Distance::Near,
        Distance::Load,
        Distance::Combination,
        Distance::Model,
        Distance::Gpu,
        Distance::Framework,
    ];

    /// Word in tables and files.
    pub fn name(self) -> &'static str {
        match self {
            Distance::Near => "near",
            Distance::Load => "load",
            Distance::Combination => "combination",
            Distance::Model => "model",
            Distance::Gpu => "gpu",
            Distance::Framework => "framework",
        }
    }
}

/// Names of [`Profile::ranges`].
const RANGES: [&str; 3] = ["batch", "isl", "osl"];

/// A profile: what `slipstream calibrate` writes and `slipstream predict` reads.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    /// The data it was fitted to, and how.
    pub source: String,
    /// Physical parameters.
    pub params: Params,
    /// Residual effects on log TPOT and log TTFT, by `group|level|feature`.
    pub residual: [BTreeMap<String, f32>; 2],
    /// Share of the residual that applies to log TPOT and log TTFT at each distance: what held-out
    /// deployments at that distance were predicted best with.
    pub damping: BTreeMap<Distance, [f64; 2]>,
    /// Least and largest measured batch size, input and output length, by parallel sizes.
    pub ranges: BTreeMap<String, [[f64; 2]; 3]>,
    /// Ends of the 80 % bands of TPOT and TTFT on log time, by distance and whether past saturation.
    pub bands: BTreeMap<(Distance, bool), [[f64; 2]; 2]>,
}

/// Why a text is no profile.
#[derive(Debug, Error)]
pub enum ProfileError {
    /// A line cannot be read.
    #[error("line {line}: {what}")]
    Line {
        /// Line, from 1.
        line: usize,
        /// Why it cannot be read.
        what: String,
    },
    /// Something is missing.
    #[error("{0} is missing; `slipstream calibrate` writes whole profiles")]
    Missing(String),
}

impl Profile {
    /// The profile of this build.
    pub fn built_in() -> &'static Profile {
        static PROFILE: OnceLock<Profile> = OnceLock::new();
        PROFILE.get_or_init(|| {
            let text = include_str!("../data/profile.csv");
            Profile::parse(text).expect("the built-in profile is checked by a test")
        })
    }

    /// A profile without any data: priors, no residual, wide bands.
    pub fn prior() -> Profile {
        let wide = [[-1.0, 1.0]; 2];
        Profile {
            source: "priors; nothing was fitted".into(),
            params: Params::prior(),
            residual: [BTreeMap::new(), BTreeMap::new()],
            damping: Distance::ALL.into_iter().map(|d| (d, [1.0; 2])).collect(),
            ranges: BTreeMap::new(),
            bands: Distance::ALL
                .into_iter()
                .flat_map(|d| [((d, false), wide), ((d, true), wide)])
                .collect(),
        }
    }

    /// The text of a profile, CSV: kind, name, and numbers.
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        for line in self.source.lines() {
            let _ = writeln!(text, "# {line}");
        }
        text.push_str("kind,name,a,b,c,d\n");
        for (name, value, _) in self.params.named() {
            let _ = writeln!(text, "param,{name},{value:.5},,,");
        }
        for ((distance, saturated), [tpot, ttft]) in &self.bands {
            let at = if *saturated { "past" } else { "below" };
            let _ = writeln!(
                text,
                "band,{}|{at},{:.4},{:.4},{:.4},{:.4}",
                distance.name(),
                tpot[0],
                tpot[1],
                ttft[0],
                ttft[1]
            );
        }
        for (distance, [tpot, ttft]) in &self.damping {
            let name = distance.name();
            let _ = writeln!(text, "damping,{name},{tpot:.2},{ttft:.2},,");
        }
        for (level, ranges) in &self.ranges {
            for (of, [least, most]) in RANGES.iter().zip(ranges) {
                let _ = writeln!(text, "range,{of}|{level},{least},{most},,");
            }
        }
        let mut names: Vec<&String> = self.residual[0]
            .keys()
            .chain(self.residual[1].keys())
            .collect();
        names.sort_unstable();
        names.dedup();
        for name in names {
            let of = |target: usize| self.residual[target].get(name).copied().unwrap_or(0.0);
            let _ = writeln!(text, "residual,{name},{:.4},{:.4},,", of(0), of(1));
        }
        text
    }

    /// Reads what [`Profile::to_text`] wrote.
    ///
    /// # Errors
    /// If a line is malformed, or a parameter or band is missing.
    pub fn parse(text: &str) -> Result<Profile, ProfileError> {
        let mut profile = Profile::prior();
        profile.bands.clear();
        profile.damping.clear();
        profile.source.clear();
        let index: BTreeMap<String, usize> = Params::prior()
            .named()
            .enumerate()
            .map(|(i, (name, _, _))| (name, i))
            .collect();
        let mut found = [false; COUNT];
        for (at, line) in text.lines().enumerate() {
            let wrong = |what: &str| ProfileError::Line {
                line: at + 1,
                what: what.to_owned(),
            };
            if let Some(comment) = line.strip_prefix('#') {
                profile.source.push_str(comment.trim_start());
                profile.source.push('\n');
                continue;
            }
            let cells: Vec<&str> = line.split(',').collect();
            let read = profile.read_line(&cells, &index, &mut found);
            read.map_err(|what| wrong(&what))?;
        }
        profile.check_complete(&index, &found)?;
        Ok(profile)
    }

    /// Reads a line. `index` are the places of parameters, and `found` those that were read.
    fn read_line(
        &mut self,
        cells: &[&str],
        index: &BTreeMap<String, usize>,
        found: &mut [bool],
    ) -> Result<(), String> {
        let number = |i: usize| -> Result<f64, String> {
            let cell = cells.get(i).copied().unwrap_or("");
            let value = cell.parse::<f64>().ok().filter(|x| x.is_finite());
            value.ok_or_else(|| format!("\"{cell}\" is no number"))
        };
        match *cells {
            ["kind", ..] | [""] => {}
            ["param", name, ..] => {
                let i = *index
                    .get(name)
                    .ok_or_else(|| "unknown parameter".to_owned())?;
                let value = number(2)?;
                if value <= 0.0 {
                    return Err("a parameter must be positive".to_owned());
                }
                self.params.values[i] = value;
                found[i] = true;
            }
            ["band", name, ..] => {
                let (distance, place) = name.split_once('|').ok_or_else(|| "no band".to_owned())?;
                let distance = Distance::ALL.into_iter().find(|d| d.name() == distance);
                let distance = distance.ok_or_else(|| "unknown distance".to_owned())?;
                let band = [[number(2)?, number(3)?], [number(4)?, number(5)?]];
                if band.iter().any(|[low, high]| *low > 0.0 || *high < 0.0) {
                    return Err("a band must contain 0".to_owned());
                }
                self.bands.insert((distance, place == "past"), band);
            }
            ["damping", name, ..] => {
                let distance = Distance::ALL.into_iter().find(|d| d.name() == name);
                let distance = distance.ok_or_else(|| "unknown distance".to_owned())?;
                let shares = [number(2)?, number(3)?];
                if !shares.iter().all(|share| (0.0..=1.0).contains(share)) {
                    return Err("a share must be 0 to 1".to_owned());
                }
                self.damping.insert(distance, shares);
            }
            ["range", name, ..] => {
                let (of, level) = name.split_once('|').ok_or_else(|| "no range".to_owned())?;
                let of = RANGES.iter().position(|range| *range == of);
                let of = of.ok_or_else(|| "unknown range".to_owned())?;
                let everything = [[0.0, f64::INFINITY]; 3];
                let ranges = self.ranges.entry(level.to_owned());
                ranges.or_insert(everything)[of] = [number(2)?, number(3)?];
            }
            ["residual", name, ..] => {
                for (target, residual) in self.residual.iter_mut().enumerate() {
                    let effect = nearest_f32(number(2 + target)?);
                    if !effect.is_finite() {
                        return Err("an effect must fit into 32 bits".to_owned());
                    }
                    residual.insert(name.to_owned(), effect);
                }
            }
            _ => {
                return Err("neither `param`, `band`, `damping`, `range` nor `residual`".to_owned());
            }
        }
        Ok(())
    }

    /// Refuses a profile without one of its parameters, bands or dampings.
    fn check_complete(
        &self,
        index: &BTreeMap<String, usize>,
        found: &[bool],
    ) -> Result<(), ProfileError> {
        if let Some((name, _)) = index.iter().find(|(_, i)| !found[**i]) {
            return Err(ProfileError::Missing(format!("the parameter `{name}`")));
        }
        for distance in Distance::ALL {
            if !self.damping.contains_key(&distance) {
                let name = format!("the damping `{}`", distance.name());
                return Err(ProfileError::Missing(name));
            }
            for past in [false, true] {
                if !self.bands.contains_key(&(distance, past)) {
                    let name = format!("the band `{}`", distance.name());
                    return Err(ProfileError::Missing(name));
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_built_in_profile_is_whole_and_small() {
        let text = include_str!("../data/profile.csv");
        Profile::parse(text).unwrap();
        assert!(text.len() < 2_000_000, "{}", text.len());
    }

    #[test]
    fn a_profile_survives_its_text_and_malformed_ones_are_refused_by_line() {
        let mut profile = Profile::prior();
        profile.source = "a source\n".into();
        profile.residual[0].insert("fw|vllm|1".into(), 0.25);
        profile.residual[1].insert("fw|vllm|1".into(), -0.5);
        let text = profile.to_text();
        assert_eq!(Profile::parse(&text).unwrap(), profile);
        for (from, to, part) in [
            (
                "param,gemm_bf16,0.75000",
                "param,gemm_bf16,x",
                "line 3: \"x\" is no number",
            ),
            (
                "param,gemm_bf16,0.75000",
                "param,gemm_bf16,-1",
                "must be positive",
            ),
            ("param,gemm_bf16", "param,gemm_bf17", "unknown parameter"),
            (
                "param,gemm_bf16",
                "# param,gemm_bf16",
                "`gemm_bf16` is missing",
            ),
            ("band,near|", "band,nearly|", "unknown distance"),
            (
                "band,near|below,-1.0000,1.0000,-1",
                "band,near|below,0.5,1.0,-1",
                "must contain 0",
            ),
            ("residual,", "rest,", "neither"),
            (
                "residual,fw|vllm|1,0.2500",
                "residual,fw|vllm|1,1e300",
                "must fit into 32 bits",
            ),
        ] {
            let error = Profile::parse(&text.replace(from, to))
                .unwrap_err()
                .to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
