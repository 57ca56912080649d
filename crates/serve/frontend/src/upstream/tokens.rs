//! A prompt as its engine will tokenize it, where the router knows how.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde_json::value::RawValue;
use slipstream_base::{BlockHash, Prompt, TokenId};

use crate::door::clock::now_unix_s;
use crate::openai;
use crate::text::{ChatOptions, Message, TextModel};

/// Fields that change a prompt in ways that are not modelled here. Sources: the request classes of vLLM
/// (`entrypoints/openai`) and SGLang (`protocol.py`).
const UNKNOWN_INPUTS: [&str; 12] = [
    "tools",
    "functions",
    "documents",
    "chat_template",
    "continue_final_message",
    "truncate_prompt_tokens",
    "mm_processor_kwargs",
    "media_io_kwargs",
    "reasoning_effort",
    "prompt_embeds",
    "suffix",
    "input_ids",
];

type Fields<'a> = BTreeMap<String, &'a RawValue>;

/// Tokenizes the prompt in `body`, a request to `path` for the model `base` or its LoRA adapter `lora`, in
/// blocks of `block_size`. Of several prompts the first counts. `None` if its tokens are not certain.
pub(super) fn prompt(
    text: &TextModel,
    path: &str,
    body: &[u8],
    base: &str,
    lora: &str,
    block_size: u32,
) -> Option<Prompt> {
    // The last one of a name wins, as in Python's parser.
    let fields: Fields<'_> = serde_json::from_slice(body).ok()?;
    if UNKNOWN_INPUTS.iter().any(|name| is_set(&fields, name)) {
        return None;
    }
    let tokens = match path {
        "/v1/completions" => completion(text, &fields)?,
        "/v1/chat/completions" => chat(text, &fields)?,
        _ => return None,
    };
    let salt = optional(&fields, "cache_salt", String::new())?;
    let root = BlockHash::root(base, lora, &salt);
    Prompt::from_tokens(&tokens, block_size, root).ok()
}

fn is_set(fields: &Fields<'_>, name: &str) -> bool {
    let value = fields.get(name).map(|raw| raw.get());
    value.is_some_and(|value| !matches!(value, "null" | "false" | "[]" | "{}" | "\"\""))
}

/// The value of a field; `default` without one. `None` if it is of another type.
fn optional<'a, T: serde::Deserialize<'a>>(
    fields: &Fields<'a>,
    name: &str,
    default: T,
) -> Option<T> {
    let value: Option<T> = match fields.get(name) {
        None => None,
        Some(raw) => serde_json::from_str(raw.get()).ok()?,
    };
    Some(value.unwrap_or(default))
}

fn string(fields: &Fields<'_>, name: &str) -> Option<String> {
    serde_json::from_str(fields.get(name)?.get()).ok()
}

fn completion(text: &TextModel, fields: &Fields<'_>) -> Option<Vec<TokenId>> {
    let special = optional(fields, "add_special_tokens", true)?;
    let raw = fields.get("prompt")?.get();
    let encode = |prompt: &str| {
        let mut tokens = Vec::with_capacity(prompt.len() / 3);
        text.encode(prompt, special, &mut tokens);
        tokens
    };
    let Some(list) = raw.strip_prefix('[') else {
        return Some(encode(&serde_json::from_str::<String>(raw).ok()?));
    };
    match list.trim_ascii_start().bytes().next()? {
        b'"' => {
            let prompts: Vec<String> = serde_json::from_str(raw).ok()?;
            Some(encode(prompts.first()?))
        }
        b'[' => {
            let prompts: Vec<Vec<TokenId>> = serde_json::from_str(raw).ok()?;
            prompts.into_iter().next()
        }
        _ => serde_json::from_str(raw).ok(),
    }
}

fn chat(text: &TextModel, fields: &Fields<'_>) -> Option<Vec<TokenId>> {
    if is_set(fields, "add_special_tokens") {
        return None;
    }
    let raw: Vec<Fields<'_>> = serde_json::from_str(fields.get("messages")?.get()).ok()?;
    let messages = raw.iter().map(message).collect::<Option<Vec<_>>>()?;
    let kwargs = match fields.get("chat_template_kwargs") {
        Some(raw) if raw.get() != "null" => openai::members(raw.get())?,
        _ => Vec::new(),
    };
    let options = ChatOptions {
        add_generation_prompt: optional(fields, "add_generation_prompt", true)?,
        continue_final_message: false,
        tools: &[],
        template_kwargs: &kwargs,
        now_unix_s: now_unix_s(),
    };
    let mut tokens = Vec::new();
    text.encode_chat(&messages, &options, &mut tokens).ok()?;
    Some(tokens)
}

/// A message of text alone. Templates read other members in ways of their own.
fn message(fields: &Fields<'_>) -> Option<Message<'static>> {
    let known = |name: &&String| matches!(name.as_str(), "role" | "content" | "name");
    if fields
        .keys()
        .any(|name| !known(&name) && is_set(fields, name))
    {
        return None;
    }
    let content = fields.get("content")?.get();
    let content = if content.starts_with('[') {
        // One part is rendered as a text is, whichever of the two forms the template takes.
        let parts: Vec<Fields<'_>> = serde_json::from_str(content).ok()?;
        let [part] = &parts[..] else { return None };
        if part.len() != 2 || string(part, "type")? != "text" {
            return None;
        }
        string(part, "text")?
    } else {
        string(fields, "content")?
    };
    Some(Message {
        role: Cow::Owned(string(fields, "role")?),
        content: Cow::Owned(content),
        parts: None,
        name: optional(fields, "name", None::<String>)?.map(Cow::Owned),
        tools: None,
        reasoning: None,
        images: Vec::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHAT: &str = "/v1/chat/completions";
    const COMPLETION: &str = "/v1/completions";

    fn read(path: &str, body: &str) -> Option<Prompt> {
        prompt(&TextModel::builtin(), path, body.as_bytes(), "m", "", 4)
    }

    #[test]
    fn a_text_and_its_tokens_are_one_prompt() {
        let words = "one two three four five six seven eight nine ten eleven twelve";
        let mut tokens = Vec::new();
        TextModel::builtin().encode(words, true, &mut tokens);
        let root = BlockHash::root("m", "", "");
        let expected = root.chain(&tokens, 4);
        assert!(expected.len() > 1);
        for prompt in [
            format!("\"{words}\""),
            format!("[ \"{words}\", \"x\"]"),
            format!("{tokens:?}"),
            format!("[{tokens:?}, [1]]"),
        ] {
            let body = format!(r#"{{"prompt":"no","stop":["x"],"tools":[],"prompt":{prompt}}}"#);
            assert_eq!(
                read(COMPLETION, &body).unwrap().blocks(),
                expected,
                "{prompt}"
            );
            let salted = body.replace("\"stop\"", "\"cache_salt\":\"s\",\"stop\"");
            let salted = read(COMPLETION, &salted).unwrap();
            assert_eq!(
                salted.blocks(),
                BlockHash::root("m", "", "s").chain(&tokens, 4)
            );
        }
    }

    #[test]
    fn chats_are_rendered_by_the_template() {
        let messages = [
            Message::new("system", "be brief"),
            Message::new("user", "hi there"),
        ];
        let options = ChatOptions {
            add_generation_prompt: true,
            continue_final_message: false,
            tools: &[],
            template_kwargs: &[],
            now_unix_s: 0,
        };
        let mut tokens = Vec::new();
        let text = TextModel::builtin();
        text.encode_chat(&messages, &options, &mut tokens).unwrap();
        let body = r#"{"messages":[{"role":"system","content":"be brief","tool_calls":null},
            {"role":"user","content":[{"type":"text","text":"hi there"}]}],"response_format":{"type":"json"}}"#;
        let prompt = read(CHAT, body).unwrap();
        assert_eq!(
            prompt.blocks(),
            BlockHash::root("m", "", "").chain(&tokens, 4)
        );
    }

    #[test]
    fn prompts_whose_tokens_are_not_certain_are_not_guessed() {
        let chat = |more: &str, message: &str| {
            format!(
                r#"{{"messages":[{{"role":"user","content":"a long enough text"{message}}}]{more}}}"#
            )
        };
        assert!(read(CHAT, &chat("", "")).is_some());
        for body in [
            chat(r#","tools":[{"type":"function"}]"#, ""),
            chat(r#","chat_template":"x""#, ""),
            chat(r#","add_special_tokens":true"#, ""),
            chat("", r#","reasoning_content":"hm""#),
            chat("", r#","tool_calls":[{}]"#),
            r#"{"messages":[{"role":"user","content":[{"type":"image_url"}]}]}"#.into(),
            r#"{"messages":7}"#.into(),
            "[]".into(),
        ] {
            assert!(read(CHAT, &body).is_none(), "{body}");
        }
        for prompt in ["7", "[-1]", "[]", "[[]]", "[1.5]", "null", "{}"] {
            let body = format!(r#"{{"prompt":{prompt}}}"#);
            assert!(read(COMPLETION, &body).is_none(), "{prompt}");
        }
        assert!(read("/v1/embeddings", r#"{"prompt":"a long enough text"}"#).is_none());
    }
}
