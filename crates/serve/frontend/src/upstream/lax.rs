//! The fields of a client's request as vLLM reads them. No I/O.
//!
//! vLLM's request classes convert values (pydantic's lax mode): `2.0`, `"2"` and `true` are whole numbers, `1` and `"yes"`
//! are truth values. SGLang's do the same.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};

use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::api::StreamKind;
use crate::openai::{lax_real, lax_truth, lax_whole};

const WHOLE: &[&str] = &[
    "n",
    "best_of",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "min_tokens",
    "top_k",
    "top_logprobs",
    "prompt_logprobs",
    "truncate_prompt_tokens",
    "thinking_token_budget",
    "priority",
    "seed",
];

const TRUTH: &[&str] = &[
    "stream",
    "echo",
    "return_token_ids",
    "include_stop_str_in_output",
    "use_beam_search",
    "continue_final_message",
    "add_generation_prompt",
    "add_special_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "include_reasoning",
    "parallel_tool_calls",
    // Of `stream_options`.
    "include_usage",
    "continuous_usage_stats",
];

const REAL: &[&str] = &[
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
];

/// A longer text, in bytes, is no number.
const SCALAR_MAX: usize = 64;

/// Converts the value of `field`. One that cannot be converted stays: engines refuse it.
fn convert(field: &str, value: &mut Value) {
    let converted = if WHOLE.contains(&field) {
        lax_whole(value)
    } else if TRUTH.contains(&field) {
        lax_truth(value).map(Value::Bool)
    } else if REAL.contains(&field) && !value.is_number() {
        lax_real(value).and_then(|of| serde_json::Number::from_f64(of).map(Value::Number))
    } else {
        None
    };
    if let Some(converted) = converted {
        *value = converted;
    }
    if field == "stream_options"
        && let Value::Object(options) = value
    {
        for (name, value) in options {
            convert(name, value);
        }
    }
}

/// The value of `field`, written as `json`; `None` if it is nested too deep, or not JSON.
pub(super) fn value(field: &str, json: &str) -> Option<Value> {
    let mut value = serde_json::from_str(json).ok()?;
    convert(field, &mut value);
    Some(value)
}

/// A whole number from 0, written as `json`.
pub(super) fn whole(json: &str) -> Option<u64> {
    let short = Some(json).filter(|json| json.len() <= SCALAR_MAX)?;
    lax_whole(&serde_json::from_str(short).ok()?)?.as_u64()
}

/// A truth value, written as `json`.
pub(super) fn truth(json: &str) -> Option<bool> {
    let short = Some(json).filter(|json| json.len() <= SCALAR_MAX)?;
    lax_truth(&serde_json::from_str(short).ok()?)
}

/// Whether `value` asks for nothing.
pub(super) fn is_unset(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(is_set) => !is_set,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::String(text) => text.is_empty() || text == "none",
    }
}

/// A body without the byte order mark that some engines accept.
pub(super) fn without_bom(body: &[u8]) -> &[u8] {
    body.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(body)
}

/// The fields of a request, converted.
#[derive(Clone, Debug)]
pub(super) struct Body {
    fields: Map<String, Value>,
    /// Fields that cannot be read, as they are nested deeper than our parser goes.
    unread: BTreeMap<String, Box<RawValue>>,
}

impl Deref for Body {
    type Target = Map<String, Value>;

    fn deref(&self) -> &Map<String, Value> {
        &self.fields
    }
}

impl DerefMut for Body {
    fn deref_mut(&mut self) -> &mut Map<String, Value> {
        &mut self.fields
    }
}

impl Body {
    /// Reads a request; `None` if it is not a JSON object. The last field of a name wins, as in Python's parser.
    pub(super) fn read(body: &[u8]) -> Option<Body> {
        let all: BTreeMap<Cow<'_, str>, &RawValue> =
            serde_json::from_slice(without_bom(body)).ok()?;
        let (mut fields, mut unread) = (Map::new(), BTreeMap::new());
        for (name, raw) in all {
            match value(&name, raw.get()) {
                Some(value) => {
                    fields.insert(name.into_owned(), value);
                }
                None => {
                    unread.insert(name.into_owned(), raw.to_owned());
                }
            }
        }
        Some(Body { fields, unread })
    }

    /// Removes `field`, also one that could not be read.
    pub(super) fn discard(&mut self, field: &str) {
        self.fields.remove(field);
        self.unread.remove(field);
    }

    /// Names of fields that cannot be read.
    pub(super) fn unread(&self) -> impl Iterator<Item = &str> {
        self.unread.keys().map(String::as_str)
    }

    /// Whether `field` is true.
    pub(super) fn is(&self, field: &str) -> bool {
        self.get(field) == Some(&Value::Bool(true))
    }

    /// It as JSON.
    pub(super) fn write(&self) -> Vec<u8> {
        let mut out = serde_json::to_vec(&self.fields).unwrap_or_default();
        for (name, raw) in self
            .unread
            .iter()
            .filter(|(name, _)| !self.fields.contains_key(*name))
        {
            out.pop();
            if out.len() > 1 {
                out.push(b',');
            }
            out.extend_from_slice(Value::from(name.as_str()).to_string().as_bytes());
            out.push(b':');
            out.extend_from_slice(raw.get().as_bytes());
            out.push(b'}');
        }
        out
    }

    /// Number of choices that it asks for; `None` if that is unknown.
    pub(super) fn choices(&self) -> Option<u64> {
        if self.unread().any(|name| matches!(name, "n" | "prompt")) {
            return None;
        }
        let prompts = match self.get("prompt") {
            Some(Value::Array(items)) if items.iter().all(|item| !item.is_number()) => items.len(),
            _ => 1,
        };
        let each = match self.get("n") {
            None | Some(Value::Null) => 1,
            Some(n) => n.as_u64()?,
        };
        Some(each.max(1).saturating_mul(prompts.max(1) as u64))
    }

    /// Field and value of the limit of the answer's tokens, if it has one that engines go by.
    pub(super) fn limit(&self, kind: StreamKind) -> Option<(&'static str, u64)> {
        let fields: &[&str] = match kind {
            StreamKind::Chat => &["max_completion_tokens", "max_tokens"],
            StreamKind::Completion => &["max_tokens"],
        };
        let mut each = fields.iter();
        each.find_map(|&field| Some((field, self.get(field)?.as_u64()?)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    /// Ways to write a whole number and a truth value.
    fn numbers(n: u32) -> Vec<Value> {
        vec![
            json!(n),
            json!(f64::from(n)),
            json!(n.to_string()),
            json!(format!(" {n}.0 ")),
            json!(format!("+{n}")),
        ]
    }

    fn truths(is: bool) -> Vec<Value> {
        let words: &[&str] = if is {
            &["1", "true", "TRUE", "on", "t", "Yes", "y"]
        } else {
            &["0", "false", "False", "off", "f", "No", "n"]
        };
        let words = words.iter().map(|word| json!(word));
        words
            .chain([
                json!(is),
                json!(u8::from(is)),
                json!(f64::from(u8::from(is))),
            ])
            .collect()
    }

    proptest! {
        /// However values are written, and however deep others are nested, they are those of the plain request.
        #[test]
        fn values_are_read_in_every_way_to_write_them(
            n in 1u32..9,
            max in 1u32..90,
            is in any::<bool>(),
            way in prop::collection::vec(0usize..10, 3),
            depth in 0usize..400,
            mark in any::<bool>(),
        ) {
            let of = |all: Vec<Value>, way: usize| all[way % all.len()].clone();
            let body = json!({"prompt": "x", "n": of(numbers(n), way[0]), "max_tokens": of(numbers(max), way[1]),
                "include_stop_str_in_output": of(truths(is), way[2]),
                "stream_options": {"include_usage": of(truths(is), way[2])}});
            let deep = format!("{}{}", "[".repeat(depth), "]".repeat(depth));
            let deep = if depth == 0 { "7".to_owned() } else { deep };
            let text = format!("{}{},\"odd\":{deep}}}", if mark { "\u{feff}" } else { "" },
                body.to_string().strip_suffix('}').unwrap());
            let read = Body::read(text.as_bytes()).unwrap();
            prop_assert_eq!(read.choices(), Some(u64::from(n)));
            prop_assert_eq!(read.limit(StreamKind::Completion), Some(("max_tokens", u64::from(max))));
            prop_assert_eq!(read.is("include_stop_str_in_output"), is);
            prop_assert_eq!(&read["stream_options"]["include_usage"], &json!(is));
            let written = read.write();
            let fields: BTreeMap<String, &RawValue> = serde_json::from_slice(&written).unwrap();
            prop_assert_eq!((fields.len(), fields["odd"].get()), (6, deep.as_str()));
        }
    }

    #[test]
    fn what_vllm_refuses_is_no_number() {
        for n in [
            json!("two"),
            json!(2.5),
            json!("2.5"),
            json!([2]),
            json!(-1),
            json!(""),
        ] {
            let body = json!({"prompt": "x", "n": n}).to_string();
            assert_eq!(Body::read(body.as_bytes()).unwrap().choices(), None, "{n}");
        }
        let choices = |text: &str| Body::read(text.as_bytes()).unwrap().choices();
        assert_eq!(choices(r#"{"n":3,"n":2}"#), Some(2), "the last one wins");
        assert_eq!(choices(r#"{"n":null,"prompt":["a","b"]}"#), Some(2));
        assert_eq!(choices(r#"{"n":true,"prompt":[1,2]}"#), Some(1));
    }
}
