//! The fields of a client's body that routing reads. The body itself is passed on as it came.

use std::fmt;

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;
use slipstream_base::{BlockHash, Prompt, Tail};

use super::continuity;
use super::lax::{self, without_bom};

/// Fields of a body that decide where it goes. Values that are not of the expected type count as absent:
/// the engine names their errors.
#[derive(Debug, Default)]
#[allow(clippy::struct_excessive_bools)] // each is a field of the body
pub(super) struct Peek<'a> {
    pub(super) model: Option<String>,
    pub(super) stream: bool,
    /// Whether it asks for token ids, if it has the field.
    pub(super) return_token_ids: Option<bool>,
    /// Limit of the answer's tokens.
    pub(super) max_tokens: Option<u32>,
    /// Answers; 1 unless set.
    pub(super) n: Option<u32>,
    /// `n` has a value that is no number.
    pub(super) has_odd_n: bool,
    pub(super) priority: Option<i32>,
    /// The stored answer that this one follows.
    pub(super) previous_response_id: Option<String>,
    /// `previous_response_id` is there more than once: parsers differ on which counts.
    pub(super) has_two_previous: bool,
    /// `request_id` names the request, and what it makes.
    pub(super) chooses_id: bool,
    /// A field keeps its stream at one engine ([`continuity::hinders`]).
    pub(super) hinders: bool,
    /// Its stream continues by tokens only: it has tools.
    pub(super) has_tools: bool,
    /// Its messages have other parts than text.
    pub(super) has_media: bool,
    /// A field keeps prompt and answer at one engine ([`Peek::stays_whole`]).
    is_bound: bool,
    /// Fields that precede the prompt's text in the engine's template: `tools`, `system`, `instructions`.
    before: Vec<&'a str>,
    /// `messages`, `prompt` or `input`, as it is written.
    prompt: Option<&'a str>,
}

/// Reads `body`; `None` if it is not a JSON object.
pub(super) fn peek(body: &[u8]) -> Option<Peek<'_>> {
    serde_json::from_slice(without_bom(body)).ok()
}

impl<'de> Deserialize<'de> for Peek<'de> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Fields;
        impl<'de> Visitor<'de> for Fields {
            type Value = Peek<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Peek<'de>, A::Error> {
                let mut peek = Peek::default();
                let mut previous = 0;
                // The last one of a name wins, as in Python's parser.
                while let Some(name) = map.next_key::<std::borrow::Cow<'de, str>>()? {
                    let name = &*name;
                    match name {
                        "model" => peek.model = read(map.next_value()?),
                        "stream" => peek.stream = truth(map.next_value()?).unwrap_or(false),
                        "return_token_ids" => {
                            let raw: &RawValue = map.next_value()?;
                            let asks = raw.get() != "null" && truth(raw) != Some(false);
                            peek.return_token_ids = Some(asks);
                        }
                        "max_tokens" | "max_completion_tokens" | "max_output_tokens" => {
                            peek.max_tokens = whole(map.next_value()?).or(peek.max_tokens);
                        }
                        "n" => {
                            let raw = peek.hindered(name, map.next_value()?);
                            peek.n = whole(raw);
                            peek.has_odd_n = peek.n.is_none() && raw.get() != "null";
                        }
                        "best_of" => {
                            let best_of = whole(peek.hindered(name, map.next_value()?));
                            peek.is_bound |= best_of.is_some_and(|n| n > 1);
                        }
                        "use_beam_search" | "echo" => {
                            let raw = peek.hindered(name, map.next_value()?);
                            peek.is_bound |= truth(raw).unwrap_or(false);
                        }
                        "prompt_logprobs" | "kv_transfer_params" => {
                            let raw = peek.hindered(name, map.next_value()?);
                            peek.is_bound |= raw.get() != "null";
                        }
                        "request_id" => {
                            peek.chooses_id |= map.next_value::<&RawValue>()?.get() != "null";
                        }
                        "previous_response_id" => {
                            previous += 1;
                            peek.has_two_previous = previous > 1;
                            peek.previous_response_id = read(map.next_value()?);
                        }
                        "priority" => peek.priority = read(map.next_value()?),
                        "messages" | "prompt" | "input" => {
                            let raw: &RawValue = map.next_value()?;
                            peek.prompt = Some(raw.get());
                            peek.has_media = name == "messages" && !continuity::is_plain_json(raw);
                        }
                        "tools" | "system" | "instructions" => {
                            let raw = map.next_value::<&RawValue>()?.get();
                            peek.has_tools |= name == "tools" && !matches!(raw, "null" | "[]");
                            peek.before.push(raw);
                        }
                        _ if continuity::may_hinder(name) => {
                            peek.hindered(name, map.next_value()?);
                        }
                        _ => {
                            map.next_value::<IgnoredAny>()?;
                        }
                    }
                }
                Ok(peek)
            }
        }
        from.deserialize_map(Fields)
    }
}

fn read<'a, T: Deserialize<'a>>(raw: &'a RawValue) -> Option<T> {
    serde_json::from_str(raw.get()).ok()
}

fn whole(raw: &RawValue) -> Option<u32> {
    lax::whole(raw.get())?.try_into().ok()
}

fn truth(raw: &RawValue) -> Option<bool> {
    lax::truth(raw.get())
}

/// Text that is compared, bytes: 131,072 tokens, the context of most models. A decision takes time for each
/// block, on the shard's thread; a longer prompt is often an image or a file as text.
const TEXT_BYTES_MAX: usize = 512 << 10;

/// Bytes of text that count as one token. Byte-pair encodings of English and code have 3.5 to 4.5 bytes
/// per token, so loads in these units compare with the engines' own.
const BYTES_PER_TOKEN: usize = 4;

impl<'a> Peek<'a> {
    /// Notes `field` if its value `raw` keeps a stream at its engine.
    fn hindered(&mut self, field: &str, raw: &'a RawValue) -> &'a RawValue {
        self.hinders |= continuity::hinders_json(field, raw.get());
        raw
    }

    /// Whether there is anything to tokenize.
    pub(super) fn has_prompt(&self) -> bool {
        self.prompt.is_some()
    }

    /// Whether one engine must compute the prompt and its answer: several answers or prompts, of which the second
    /// request would find no more keys and values; log-probabilities of the prompt, which the decode engine would
    /// have to compute; or a client that orchestrates the engines itself.
    pub(super) fn stays_whole(&self) -> bool {
        self.is_bound || self.n.is_some_and(|n| n > 1) || self.prompt.is_none_or(is_several)
    }

    /// Number of prompts.
    pub(super) fn prompts(&self) -> u32 {
        let several = self.prompt.filter(|prompt| is_several(prompt));
        let several = several.and_then(|of| serde_json::from_str::<Vec<IgnoredAny>>(of).ok());
        several.map_or(1, |of| u32::try_from(of.len()).unwrap_or(u32::MAX))
    }

    /// The prompt in blocks of text, for an index of routed prompts: `block_size` tokens of
    /// [`BYTES_PER_TOKEN`] bytes each. Two prompts share blocks as far as their text is equal from the
    /// start, for one model and one set of tools. Text beyond [`TEXT_BYTES_MAX`] does not count.
    pub(super) fn text_blocks(&self, block_size: u32, root: BlockHash) -> Option<Prompt> {
        let text = self.prompt?;
        let mut tokens = Vec::new();
        let mut left = TEXT_BYTES_MAX;
        for part in self.before.iter().chain([&text]) {
            let part = &part.as_bytes()[..part.len().min(left)];
            left -= part.len();
            push_tokens(&mut tokens, part);
        }
        let blocks = root.chain(&tokens, block_size);
        let len = u32::try_from(tokens.len()).ok()?;
        // The engine's tokens are others.
        let tail = Tail::Opaque { id: 0 };
        Prompt::from_parts(len, block_size, blocks.into(), tail).ok()
    }
}

/// Whether `prompt` is a list of several prompts. A list of numbers or of messages is one.
fn is_several(prompt: &str) -> bool {
    let of_prompts = prompt
        .strip_prefix('[')
        .is_some_and(|rest| rest.trim_start().starts_with(['"', '[']));
    of_prompts
        && serde_json::from_str::<Vec<IgnoredAny>>(prompt).is_ok_and(|prompts| prompts.len() != 1)
}

fn push_tokens(tokens: &mut Vec<u32>, text: &[u8]) {
    tokens.extend(text.chunks(BYTES_PER_TOKEN).map(|piece| {
        let mut bytes = [0; BYTES_PER_TOKEN];
        bytes[..piece.len()].copy_from_slice(piece);
        u32::from_le_bytes(bytes)
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_routing_needs_is_read() {
        let body = br#"{"x":{"model":"no"},"model":"m\u0031","stream":true,"tools":[1],
            "messages":[{"role":"user"}],"max_tokens":7,"top_k":{"odd":[null]}}"#;
        let peek = peek(body).unwrap();
        assert_eq!(peek.model.as_deref(), Some("m1"));
        assert!(peek.stream);
        assert_eq!(peek.max_tokens, Some(7));
        assert_eq!(peek.prompt, Some(r#"[{"role":"user"}]"#));
        assert_eq!(peek.before, ["[1]"]);
    }

    #[test]
    fn several_answers_or_prompts_stay_at_one_engine() {
        for (body, whole) in [
            (r#"{"prompt":"a"}"#, false),
            (r#"{"prompt":[1,2]}"#, false),
            (
                r#"{"prompt":["a"],"n":1,"best_of":1,"echo":false,"kv_transfer_params":null}"#,
                false,
            ),
            (r#"{"prompt":[ [1,2] ],"logprobs":3}"#, false),
            (r#"{"messages":[{"role":"user"},{"role":"user"}]}"#, false),
            (r#"{"prompt":["a","b"]}"#, true),
            (r#"{"prompt":[[1],[2]]}"#, true),
            (r#"{"prompt":"a","n":2}"#, true),
            (r#"{"prompt":"a","best_of":2}"#, true),
            (r#"{"prompt":"a","echo":true}"#, true),
            (r#"{"prompt":"a","use_beam_search":true}"#, true),
            (r#"{"prompt":"a","prompt_logprobs":0}"#, true),
            (
                r#"{"prompt":"a","kv_transfer_params":{"do_remote_decode":true}}"#,
                true,
            ),
            (r#"{"model":"m"}"#, true),
        ] {
            assert_eq!(
                peek(body.as_bytes()).unwrap().stays_whole(),
                whole,
                "{body}"
            );
        }
    }

    #[test]
    fn values_of_a_wrong_type_are_left_to_the_engine() {
        let peek =
            peek(br#"{"model":7,"stream":"perhaps","max_tokens":-1,"prompt":[1,2]}"#).unwrap();
        assert_eq!(
            (peek.model, peek.stream, peek.max_tokens),
            (None, false, None)
        );
        assert_eq!(peek.prompt, Some("[1,2]"));
        for text in ["", "[]", "7", "{", "{\"a\":1} x"] {
            assert!(super::peek(text.as_bytes()).is_none(), "{text}");
        }
    }

    #[test]
    fn values_that_vllm_converts_are_read() {
        let body = br#"{"model":"m","stream":"yes","max_tokens":"12","n":2.0,"prompt":"x","return_token_ids":0}"#;
        let peek = peek(body).unwrap();
        assert_eq!(
            (peek.stream, peek.max_tokens, peek.n),
            (true, Some(12), Some(2))
        );
        assert_eq!(
            (peek.return_token_ids, peek.has_odd_n),
            (Some(false), false)
        );
        assert!(peek.stays_whole() && peek.hinders);
        let asks = |json: &str| {
            let body = format!("{{\"return_token_ids\":{json}}}");
            super::peek(body.as_bytes()).unwrap().return_token_ids
        };
        assert_eq!(
            (asks("\"on\""), asks("null"), asks("[]")),
            (Some(true), Some(false), Some(true))
        );
        assert!(super::peek(br#"{"n":"two"}"#).unwrap().has_odd_n);
    }

    #[test]
    fn a_long_text_counts_up_to_a_limit() {
        let blocks = |bytes: usize| {
            let body = format!(r#"{{"prompt":"{}"}}"#, "x".repeat(bytes));
            let peek = peek(body.as_bytes()).unwrap();
            let prompt = peek.text_blocks(16, BlockHash::default()).unwrap();
            (prompt.len() as usize, prompt.blocks().to_vec())
        };
        let (tokens, most) = blocks(3 * TEXT_BYTES_MAX);
        assert_eq!(tokens, TEXT_BYTES_MAX / BYTES_PER_TOKEN);
        let (_, fewer) = blocks(TEXT_BYTES_MAX / 2);
        assert_eq!(most[..fewer.len()], fewer);
    }

    #[test]
    fn a_next_turn_shares_the_blocks_of_the_one_before() {
        let turn = |text: &str| {
            let body = format!(
                r#"{{"messages":[{{"role":"user","content":"{}"}}{text}]}}"#,
                "word ".repeat(60)
            );
            let blocks = peek(body.as_bytes()).unwrap();
            let prompt = blocks.text_blocks(16, BlockHash::default()).unwrap();
            prompt.blocks().to_vec()
        };
        let first = turn("");
        let second =
            turn(r#",{"role":"assistant","content":"and so on and so on and so on and so on"}"#);
        assert!(first.len() >= 5 && second.len() > first.len());
        assert_eq!(first[..4], second[..4]);
    }
}
