//! Modules that a quantized checkpoint keeps in 16 bits: patterns of names, matched with the modules of a model as vLLM does.

use super::model::{Attention, Experts};

/// Parts of a model whose modules have names.
#[derive(Clone, Copy, Debug)]
pub(super) struct Parts {
    pub(super) layers: u32,
    pub(super) attention: Attention,
    pub(super) experts: Option<Experts>,
}

/// How the names of a file are matched. Source: vLLM 0.33, `is_layer_skipped` in
/// `vllm/model_executor/layers/quantization/utils/quant_utils.py`, `is_layer_excluded` in `modelopt.py`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Names {
    /// The whole name, or after `re:` an expression that matches its start.
    Exact,
    /// A part of the name.
    Part,
    /// A part of the name, or with `*` a pattern of the whole name.
    Glob,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Char(u8),
    Any,
    Many,
    Digit,
    Digits,
}

/// Most layers and alternatives that are matched.
const LAYERS_MAX: u32 = 1024;
const ALTERNATIVES_MAX: usize = 64;

/// Modules of one layer, and the bits of those that make up attention, linear attention, the dense MLP and shared experts.
struct Modules {
    names: Vec<(String, u32)>,
    groups: [u32; 4],
    /// Bits of modules that no layer has: dense MLPs where every layer has experts, shared experts where there are none.
    absent: u32,
}

impl Modules {
    fn of(parts: Parts) -> Modules {
        let mut found = Modules {
            names: Vec::new(),
            groups: [0; 4],
            absent: 0,
        };
        let attention: &[&str] = match parts.attention {
            Attention::Latent { query_rank: 0, .. } => {
                &["q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
            }
            Attention::Latent { .. } => &[
                "q_a_proj",
                "q_b_proj",
                "kv_a_proj_with_mqa",
                "kv_b_proj",
                "o_proj",
            ],
            _ => &["q_proj", "k_proj", "v_proj", "o_proj"],
        };
        found.add(0, &["self_attn"], attention);
        if matches!(parts.attention, Attention::Linear { .. }) {
            found.add(1, &["linear_attn"], &["in_proj_qkvz", "out_proj"]);
        }
        let mlp = ["gate_proj", "up_proj", "down_proj"];
        found.add(2, &["mlp"], &mlp);
        if parts.experts.is_some() {
            found.add(3, &["mlp.shared_experts", "mlp.shared_expert"], &mlp);
            for name in [
                "mlp.experts.0.gate_proj",
                "mlp.experts.0.up_proj",
                "mlp.experts.1.down_proj",
                "mlp.experts",
            ] {
                found.names.push((name.to_owned(), EXPERTS));
            }
        }
        if let Some(experts) = parts.experts {
            if experts.dense_layers == 0 {
                found.absent |= found.groups[2];
            }
            if experts.shared_size == 0 {
                found.absent |= found.groups[3];
            }
        }
        found
    }

    fn add(&mut self, group: usize, of: &[&str], names: &[&str]) {
        for name in names {
            let bit = 1 << (4 * group + self.groups[group].count_ones() as usize + group);
            self.groups[group] |= bit;
            for of in of {
                self.names.push((format!("{of}.{name}"), bit));
            }
        }
    }
}

/// The bit of routed experts.
const EXPERTS: u32 = 1 << 31;

/// The modules that patterns keep, by layer.
pub(super) struct Kept {
    parts: Parts,
    modules: Modules,
    layers: Vec<u32>,
}

/// The modules to which a pattern refers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// Modules of attention, dense MLPs or shared experts.
    Modules,
    /// Routed experts too, or others under names of which nothing is known.
    Others,
    /// It has syntax that is not understood here.
    Unread,
    /// Modules of the model's class that no layer of this model has.
    Absent,
    /// None of the known names.
    Nothing,
}

impl Kept {
    pub(super) fn new(parts: Parts) -> Option<Kept> {
        (parts.layers <= LAYERS_MAX).then(|| Kept {
            parts,
            modules: Modules::of(parts),
            layers: vec![0; parts.layers as usize],
        })
    }

    /// Records the modules that `name` keeps.
    pub(super) fn keep(&mut self, name: &str, how: Names) -> Found {
        let Some(patterns) = patterns(name, how) else {
            return Found::Unread;
        };
        let starts: &[&str] = if name.contains("language_model") {
            &[
                "language_model.model.",
                "model.language_model.",
                "language_model.",
            ]
        } else {
            &["model."]
        };
        let mut found = Found::Nothing;
        let mut unknown = false;
        for (text, steps) in patterns {
            let mut any = false;
            let mut only_absent = true;
            for (layer, kept) in self.layers.iter_mut().enumerate() {
                for start in starts {
                    let start = format!("{start}layers.{layer}.");
                    if !may_start(&steps, start.as_bytes()) {
                        continue;
                    }
                    for (module, bit) in &self.modules.names {
                        if matches(&steps, start.bytes().chain(module.bytes())) {
                            any = true;
                            only_absent &= bit & self.modules.absent != 0;
                            *kept |= bit;
                            if *bit == EXPERTS {
                                return Found::Others;
                            }
                        }
                    }
                }
            }
            if any && !only_absent {
                found = Found::Modules;
            } else if any {
                if found == Found::Nothing {
                    found = Found::Absent;
                }
            } else {
                // Experts by number, or under another name.
                let experts = text.contains("expert") && !text.contains("shared");
                let others = ["moe", "feed_forward", "w1", "w2", "w3"];
                unknown |= experts || others.iter().any(|part| text.contains(part));
            }
        }
        if matches!(found, Found::Modules | Found::Absent) && unknown {
            return Found::Others;
        }
        found
    }

    /// Whether attention, and dense MLPs and shared experts, are kept: wholly or not at all, or else an error.
    pub(super) fn whole(&self) -> Result<[bool; 2], String> {
        let all = self.parts.layers;
        let linear = match self.parts.attention {
            Attention::Linear { layers, .. } => layers.min(all),
            _ => 0,
        };
        let dense = self
            .parts
            .experts
            .map_or(all, |experts| experts.dense_layers);
        let mut whole = [None; 4];
        for (group, needed) in [all - linear, linear, dense, all - dense.min(all)]
            .into_iter()
            .enumerate()
        {
            let bits = self.modules.groups[group];
            if bits == 0 || needed == 0 {
                continue;
            }
            let kept = || self.layers.iter().map(|kept| kept & bits);
            if let Some(layer) = kept().position(|kept| kept != 0 && kept != bits) {
                return Err(format!("some projections of layer {layer}"));
            }
            let layers = kept().filter(|kept| *kept == bits).count();
            if layers > 0 && layers < needed as usize {
                return Err(format!("{layers} of {needed} layers"));
            }
            whole[group] = Some(layers > 0);
        }
        let one = |groups: [Option<bool>; 2], what| match groups {
            [Some(one), Some(other)] if one != other => Err(format!("{what} alone")),
            [one, other] => Ok(one.or(other)),
        };
        let attention = one([whole[0], whole[1]], "one kind of attention")?.unwrap_or(false);
        let mlps = one([whole[2], whole[3]], "dense MLPs or shared experts")?;
        Ok([attention, mlps.unwrap_or(attention)])
    }
}

/// The alternatives of `name`, as texts and steps; `None`: it has syntax that is not understood here.
fn patterns(name: &str, how: Names) -> Option<Vec<(String, Vec<Step>)>> {
    let literal = |text: &str| text.bytes().map(Step::Char).collect::<Vec<_>>();
    let Some(expression) = name.strip_prefix("re:") else {
        // Files list the routers of layers with experts by their whole names.
        let router = name.starts_with("model.layers.") && name.rsplit('.').next() == Some("gate");
        let steps = match how {
            Names::Glob if name.contains('*') => {
                if name.contains(['?', '[']) {
                    return None;
                }
                let step = |byte| {
                    if byte == b'*' {
                        Step::Many
                    } else {
                        Step::Char(byte)
                    }
                };
                name.bytes().map(step).collect()
            }
            _ if name.contains(['*', '?', '[', '(', '|']) => return None,
            Names::Exact => literal(name),
            Names::Glob if router => literal(name),
            Names::Part | Names::Glob => {
                let mut steps = literal(name);
                steps.insert(0, Step::Many);
                steps.push(Step::Many);
                steps
            }
        };
        return Some(vec![(name.to_owned(), steps)]);
    };
    let mut texts = vec![expression.to_owned()];
    // The first group without one in it, until none is left.
    while let Some(at) = texts.iter().position(|text| text.contains(')')) {
        let text = texts.swap_remove(at);
        let (before, after) = text.split_once(')')?;
        let (before, group) = before.rsplit_once('(')?;
        let group = group.strip_prefix("?:").unwrap_or(group);
        if group.starts_with('?')
            || after.starts_with(['*', '+', '?', '{'])
            || before.ends_with('\\')
        {
            return None;
        }
        for one in group.split('|') {
            texts.push(format!("{before}{one}{after}"));
        }
        if texts.len() > ALTERNATIVES_MAX {
            return None;
        }
    }
    let all = texts.iter().flat_map(|text| text.split('|'));
    all.map(|text| Some((text.to_owned(), steps(text)?)))
        .collect()
}

/// The steps of an expression without groups.
fn steps(text: &str) -> Option<Vec<Step>> {
    let mut rest = text.trim_start_matches('^');
    let mut steps = Vec::new();
    while !rest.is_empty() {
        if rest == "$" {
            return Some(steps);
        }
        let (step, length) = if rest.starts_with("\\d") {
            (Step::Digit, 2)
        } else if rest.starts_with("[0-9]") {
            (Step::Digit, 5)
        } else if rest.starts_with("\\.") || rest.starts_with("\\_") {
            (Step::Char(rest.as_bytes()[1]), 2)
        } else {
            match rest.as_bytes()[0] {
                b'.' => (Step::Any, 1),
                byte if byte.is_ascii_alphanumeric() || b"_-/".contains(&byte) => {
                    (Step::Char(byte), 1)
                }
                _ => return None,
            }
        };
        rest = &rest[length..];
        match (step, rest.as_bytes().first()) {
            (Step::Any, Some(b'*')) => steps.push(Step::Many),
            (Step::Any, Some(b'+')) => steps.extend([Step::Any, Step::Many]),
            (Step::Digit, Some(b'+')) => steps.push(Step::Digits),
            (_, Some(b'*' | b'+' | b'?' | b'{')) => return None,
            _ => {
                steps.push(step);
                continue;
            }
        }
        rest = &rest[1..];
        if rest.starts_with(['*', '+', '?', '{']) {
            return None;
        }
    }
    // Python's `re.match` ignores the rest of the name.
    steps.push(Step::Many);
    Some(steps)
}

/// Whether a name that begins with `start` can match `steps`, by the characters before the first other step.
fn may_start(steps: &[Step], start: &[u8]) -> bool {
    let mut pairs = steps.iter().zip(start);
    let other = pairs.find(|(step, byte)| **step != Step::Char(**byte));
    other.is_none_or(|(step, _)| !matches!(step, Step::Char(_)))
}

/// Whether `steps` match the whole `name`.
fn matches(steps: &[Step], name: impl Iterator<Item = u8>) -> bool {
    // Steps that may come next.
    let close = |next: &mut Vec<usize>, mut at: usize| {
        loop {
            if !next.contains(&at) {
                next.push(at);
            }
            if steps.get(at) != Some(&Step::Many) {
                return;
            }
            at += 1;
        }
    };
    let mut now = Vec::new();
    close(&mut now, 0);
    let mut next = Vec::new();
    for byte in name {
        next.clear();
        for &at in &now {
            match steps.get(at) {
                Some(Step::Char(one)) if *one == byte => close(&mut next, at + 1),
                Some(Step::Any) => close(&mut next, at + 1),
                Some(Step::Many) => close(&mut next, at),
                Some(Step::Digit) if byte.is_ascii_digit() => close(&mut next, at + 1),
                Some(Step::Digits) if byte.is_ascii_digit() => {
                    close(&mut next, at);
                    close(&mut next, at + 1);
                }
                _ => {}
            }
        }
        if next.is_empty() {
            return false;
        }
        std::mem::swap(&mut now, &mut next);
    }
    now.contains(&steps.len())
}
