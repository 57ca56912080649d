//! Chat templates: Jinja, as Hugging Face's `transformers` runs it.

use std::borrow::Cow;

use minijinja::value::{Kwargs, Rest, Serde};
use minijinja::{Environment, Value};
use serde::Serialize;

use super::{ChatOptions, Message, TextError, clock, jinja};

/// A parsed chat template, with the tokens it may name.
pub(super) struct ChatTemplate {
    environment: Environment<'static>,
    /// Its file.
    origin: String,
    /// Special tokens by the names that they have in templates, such as `bos_token`.
    special: Vec<(String, String)>,
    /// Whether a message's content is a list of parts for it.
    takes_parts: bool,
    /// Whether it names the role `developer`.
    knows_developers: bool,
}

const NAME: &str = "chat_template";

impl ChatTemplate {
    /// Parses `source`, which was found in `origin`.
    pub(super) fn new(
        source: &str,
        origin: &str,
        special: Vec<(String, String)>,
    ) -> Result<ChatTemplate, TextError> {
        let wrong = |message| TextError::TemplateSyntax {
            origin: origin.to_owned(),
            message,
        };
        // vLLM's test (`_detect_developer_role_support` in `vllm/renderers/hf.py`).
        let knows_developers = ["\"developer\"", "'developer'"]
            .iter()
            .any(|name| source.contains(name));
        let source = jinja::rewrite(source)
            .map_err(|error| wrong(format!("line {}: {}", error.line, error.message)))?;
        let takes_parts = jinja::takes_parts(&source);
        let mut environment = jinja::environment();
        environment
            .add_template_owned(NAME, source)
            .map_err(|error| wrong(jinja::reason(&error)))?;
        Ok(ChatTemplate {
            environment,
            origin: origin.to_owned(),
            special,
            takes_parts,
            knows_developers,
        })
    }

    /// Renders `messages` up to the end of the last one's content, which the answer continues.
    pub(super) fn render_open(
        &self,
        messages: &[Message<'_>],
        options: &ChatOptions<'_>,
    ) -> Result<String, TextError> {
        // Stands behind the content, to find its end. Where the template trims, its space is gone.
        const END: &str = "\u{f8ff}end of the open message\u{f8ff} ";
        let mut messages = messages.to_vec();
        if let Some(last) = messages.last_mut() {
            let content = last.content.to_mut();
            content.push_str(END);
            let end = content.len();
            match &mut last.parts {
                None => {}
                Some(parts) => match parts.last_mut() {
                    Some(part) => part.end = end,
                    None => parts.push(0..end),
                },
            }
        }
        let mut text = self.render(&messages, options)?;
        let Some(at) = text.rfind(END.trim_end()) else {
            return Err(TextError::Template(
                "it leaves out the last message, which `continue_final_message` continues".into(),
            ));
        };
        let trims = !text[at..].starts_with(END);
        text.truncate(at);
        if trims {
            text.truncate(text.trim_end().len());
        }
        Ok(text)
    }

    /// Renders `messages`.
    pub(super) fn render(
        &self,
        messages: &[Message<'_>],
        options: &ChatOptions<'_>,
    ) -> Result<String, TextError> {
        // A template with image tokens of its own has another text, which is not modelled.
        let takes_parts =
            self.takes_parts && messages.iter().all(|message| message.images.is_empty());
        let changes =
            !self.knows_developers && messages.iter().any(|message| message.role == "developer");
        let changed = changes.then(|| without_developers(messages, takes_parts));
        // A joined message of the system stays a text.
        let (messages, joined) = (changed.as_ref())
            .map_or((messages, false), |(messages, joined)| {
                (&messages[..], *joined)
            });
        #[derive(Serialize)]
        // In vLLM's order, for templates that write whole messages. The reasoning has the two names that vLLM
        // sends, and the one that `transformers` adds in front.
        struct TemplateMessage<'a> {
            #[serde(skip_serializing_if = "Option::is_none")]
            thinking: Option<&'a str>,
            role: &'a str,
            content: Content<'a>,
            #[serde(skip_serializing_if = "Vec::is_empty")]
            tool_calls: Vec<Value>,
            #[serde(skip_serializing_if = "Option::is_none")]
            reasoning: Option<&'a str>,
            #[serde(skip_serializing_if = "Option::is_none")]
            reasoning_content: Option<&'a str>,
            #[serde(skip_serializing_if = "Option::is_none")]
            tool_call_id: Option<&'a str>,
            #[serde(skip_serializing_if = "Option::is_none")]
            name: Option<&'a str>,
        }
        let messages: Vec<TemplateMessage<'_>> = messages
            .iter()
            .enumerate()
            .map(|(at, message)| TemplateMessage {
                role: &message.role,
                content: Content::of(message, takes_parts && !(joined && at == 0)),
                name: message.name.as_deref(),
                tool_calls: message.calls().iter().map(jinja::value).collect(),
                tool_call_id: message.tools.as_ref().and_then(|t| t.call_id.as_deref()),
                reasoning: message.reasoning.as_deref(),
                reasoning_content: message.reasoning.as_deref(),
                thinking: message.reasoning.as_deref(),
            })
            .collect();
        let now = options.now_unix_s;
        let strftime_now = Value::from_function(move |args: Rest<Value>, kwargs: Kwargs| {
            let format = jinja::one_text("strftime_now", "format", &args, kwargs)?;
            clock::strftime(&format, now, jinja::TEXT_MAX).ok_or_else(jinja::too_long)
        });
        // As in `transformers`, the request's variables replace special tokens; ours replace them.
        let special = self.special.iter();
        let mut variables: Vec<(&str, Value)> = special
            .map(|(name, token)| (name.as_str(), Value::from(token.as_str())))
            .collect();
        variables.extend([
            ("documents", Value::from(())),
            ("strftime_now", strftime_now),
        ]);
        let kwargs = options.template_kwargs.iter();
        variables.extend(kwargs.map(|(name, value)| (name.as_str(), jinja::value(value))));
        variables.extend([
            ("messages", Value::from(Serde(&messages))),
            (
                "add_generation_prompt",
                Value::from(options.add_generation_prompt),
            ),
            (
                "tools",
                match options.tools {
                    [] => Value::from(()),
                    tools => tools.iter().map(jinja::value).collect(),
                },
            ),
        ]);
        self.environment
            .get_template(NAME)
            .and_then(|template| template.render(Value::from_pairs(variables)))
            .map_err(|error| match jinja::failure(&error) {
                jinja::Failure::Refused(reason) => TextError::Template(reason),
                jinja::Failure::Unsupported(reason) => TextError::TemplateUnsupported {
                    origin: self.origin.clone(),
                    message: reason,
                },
            })
    }
}

/// A message's content as the template gets it.
#[derive(Serialize)]
#[serde(untagged)]
enum Content<'a> {
    Text(Cow<'a, str>),
    Parts(Vec<TextPart<'a>>),
}

#[derive(Serialize)]
struct TextPart<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    text: &'a str,
}

impl<'a> Content<'a> {
    /// As `parse_chat_message_content` of vLLM (`vllm/renderers/chat_utils/chat_message.py`): results of tools stay texts.
    fn of(message: &'a Message<'_>, takes_parts: bool) -> Content<'a> {
        if !takes_parts {
            return Content::Text(Cow::Borrowed(&message.content));
        }
        if message.role == "tool" {
            return Content::Text(joined_parts(message));
        }
        let part = |text| TextPart { kind: "text", text };
        Content::Parts(match &message.parts {
            None => vec![part(&message.content)],
            Some(parts) => (parts.iter().cloned())
                .map(|range| part(&message.content[range]))
                .collect(),
        })
    }
}

/// A message's text in templates that take parts: empty ones have their line breaks too.
fn joined_parts<'a>(message: &'a Message<'_>) -> Cow<'a, str> {
    match &message.parts {
        None => Cow::Borrowed(&message.content),
        Some(parts) => {
            let parts = parts.iter().cloned();
            let texts: Vec<&str> = parts.map(|part| &message.content[part]).collect();
            texts.join("\n").into()
        }
    }
}

/// Developers' messages as those of the system, all of which come first and as one, and whether several were joined. Source:
/// `_convert_developer_to_system` and `_consolidate_system_messages` in `vllm/renderers/hf.py`.
fn without_developers<'a>(messages: &[Message<'a>], takes_parts: bool) -> (Vec<Message<'a>>, bool) {
    let mut messages = messages.to_vec();
    for message in &mut messages {
        if message.role == "developer" {
            message.role = "system".into();
        }
    }
    let is_system = |message: &Message<'_>| message.role == "system";
    let of_system = messages.iter().filter(|message| is_system(message)).count();
    if of_system == 1 && is_system(&messages[0]) {
        return (messages, false);
    }
    let texts: Vec<Cow<'_, str>> = (messages.iter().filter(|message| is_system(message)))
        .map(|message| {
            if takes_parts {
                joined_parts(message)
            } else {
                Cow::Borrowed(&*message.content)
            }
        })
        .filter(|text| !text.is_empty())
        .collect();
    let mut system = Message::new("system", "");
    system.content = texts.join("\n\n").into();
    messages.retain(|message| !is_system(message));
    messages.insert(0, system);
    (messages, true)
}

#[cfg(test)]
mod tests {
    use slipstream_structured::Tree;

    use super::*;

    fn render(source: &str, messages: &[(&str, &str)]) -> Result<String, String> {
        let messages: Vec<Message<'_>> = messages
            .iter()
            .map(|&(role, content)| Message::new(role, content))
            .collect();
        let special = [("bos_token", "<s>"), ("eos_token", "</s>")];
        let special = special.map(|(name, token)| (name.to_owned(), token.to_owned()));
        ChatTemplate::new(source, "a test", special.to_vec())
            .and_then(|template| {
                template.render(
                    &messages,
                    &ChatOptions {
                        add_generation_prompt: true,
                        continue_final_message: false,
                        tools: &[],
                        template_kwargs: &[("thinking".into(), Tree::Bool(false))],
                        now_unix_s: 1_783_000_000,
                    },
                )
            })
            .map_err(|error| error.to_string())
    }

    #[test]
    fn templates_see_what_transformers_gives_them() {
        let source = "{{ bos_token }}{%- for m in messages -%}\n  [{{ m['role'].upper() }}]{{ m.content.strip() }}{{ eos_token }}\n{%- endfor %}\n{% if add_generation_prompt and not thinking %}\nGO{{ tools is none }}\n{% endif %}";
        assert_eq!(
            render(source, &[("user", " hi "), ("assistant", "yo")]).unwrap(),
            "<s>[USER]hi</s>[ASSISTANT]yo</s>GOTrue\n"
        );
    }

    fn rendered(source: &str, messages: &[Message<'_>]) -> String {
        let options = ChatOptions {
            add_generation_prompt: false,
            continue_final_message: false,
            tools: &[],
            template_kwargs: &[],
            now_unix_s: 0,
        };
        let template = ChatTemplate::new(source, "a test", Vec::new()).unwrap();
        template.render(messages, &options).unwrap()
    }

    #[test]
    fn templates_that_loop_over_parts_get_parts() {
        let text = "{% for m in messages %}{{ m.content }};{% endfor %}";
        let parts = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}\
                     {% for p in m.content %}<{{ p.type }} {{ p['text'] }}>{% endfor %}{% endif %};{% endfor %}";
        let mut two = Message::new("user", "a\nb");
        two.parts = Some(vec![0..1, 2..3]);
        let mut none = Message::new("assistant", "");
        none.parts = Some(Vec::new());
        let messages = [
            two,
            none,
            Message::new("tool", "t"),
            Message::new("user", "c"),
        ];
        assert_eq!(rendered(text, &messages), "a\nb;;t;c;");
        assert_eq!(rendered(parts, &messages), "<text a><text b>;;t;<text c>;");
    }

    #[test]
    fn developers_speak_for_the_system_where_the_template_does_not_know_them() {
        let source = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}";
        let messages = [
            Message::new("system", "a"),
            Message::new("user", "b"),
            Message::new("developer", "c"),
        ];
        assert_eq!(rendered(source, &messages), "system:a\n\nc;user:b;");
        assert_eq!(rendered(source, &messages[2..]), "system:c;");
        let knows = format!("{source}{{% if 'developer' == 1 %}}{{% endif %}}");
        assert_eq!(rendered(&knows, &messages), "system:a;user:b;developer:c;");
    }

    #[test]
    fn a_template_can_refuse() {
        let source =
            "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}";
        assert_eq!(
            render(source, &[("system", "x")]).unwrap_err(),
            "the chat template refused the messages: user first"
        );
        assert_eq!(
            render("{{ messages }}\n{% if %}", &[]).unwrap_err(),
            "the chat template of a test is not valid Jinja: line 2: syntax error: unexpected end of block"
        );
        assert_eq!(
            render(
                "{% macro f(x) %}\n{{ x.y.z }}{% endmacro %}\n{{ f(1) }}",
                &[]
            )
            .unwrap_err(),
            "the chat template refused the messages: line 2: undefined value"
        );
    }

    #[test]
    fn json_is_written_as_python_writes_it() {
        assert_eq!(
            render("{{ {'a': [1, '<b>']} | tojson }}", &[]).unwrap(),
            r#"{"a": [1, "<b>"]}"#
        );
    }
}
