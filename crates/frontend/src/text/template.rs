//! Chat templates: Jinja, as Hugging Face's `transformers` runs it.

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde};
use minijinja::{Environment, Error, ErrorKind, Value};
use serde::Serialize;

use slipstream_base::width::to_usize;

use super::{ChatOptions, Message, TextError};
use crate::structured::Tree;

/// A parsed chat template, with the tokens it may name.
pub(super) struct ChatTemplate {
    environment: Environment<'static>,
    bos_token: Option<String>,
    eos_token: Option<String>,
}

const NAME: &str = "chat_template";

impl ChatTemplate {
    /// Parses `source`.
    pub(super) fn new(
        source: String,
        bos_token: Option<String>,
        eos_token: Option<String>,
    ) -> Result<ChatTemplate, TextError> {
        let mut environment = Environment::new();
        // As `transformers` sets them up (`utils/chat_template_utils.py`).
        environment.set_syntax(
            SyntaxConfig::builder()
                .trim_blocks(true)
                .lstrip_blocks(true)
                .build()
                .expect("the usual delimiters are valid"),
        );
        // Templates call methods of Python's strings, lists and dicts.
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function(
            "raise_exception",
            |message: String| -> Result<Value, Error> {
                Err(Error::new(ErrorKind::InvalidOperation, message))
            },
        );
        environment.add_filter("tojson", tojson);
        environment
            .add_template_owned(NAME, source)
            .map_err(|error| TextError::TemplateSyntax(error.to_string()))?;
        Ok(ChatTemplate {
            environment,
            bos_token,
            eos_token,
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
            last.content.to_mut().push_str(END);
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
        #[derive(Serialize)]
        struct TemplateMessage<'a> {
            role: &'a str,
            content: &'a str,
            #[serde(skip_serializing_if = "Option::is_none")]
            name: Option<&'a str>,
            #[serde(skip_serializing_if = "<[Tree]>::is_empty")]
            tool_calls: &'a [Tree],
            #[serde(skip_serializing_if = "Option::is_none")]
            tool_call_id: Option<&'a str>,
        }
        let messages: Vec<TemplateMessage<'_>> = messages
            .iter()
            .map(|message| TemplateMessage {
                role: &message.role,
                content: &message.content,
                name: message.name.as_deref(),
                tool_calls: message.calls(),
                tool_call_id: message.tools.as_ref().and_then(|t| t.call_id.as_deref()),
            })
            .collect();
        let now = options.now_unix_s;
        let strftime_now = Value::from_function(move |format: String| strftime(&format, now));
        // The request's variables go first: they cannot replace ours.
        let mut variables: Vec<(&str, Value)> = options
            .template_kwargs
            .iter()
            .map(|(name, value)| (name.as_str(), Value::from(Serde(value))))
            .collect();
        variables.extend([
            ("messages", Value::from(Serde(&messages))),
            (
                "add_generation_prompt",
                Value::from(options.add_generation_prompt),
            ),
            ("bos_token", Value::from(Serde(&self.bos_token))),
            ("eos_token", Value::from(Serde(&self.eos_token))),
            (
                "tools",
                match options.tools {
                    [] => Value::from(()),
                    tools => Value::from(Serde(tools)),
                },
            ),
            ("documents", Value::from(())),
            ("strftime_now", strftime_now),
        ]);
        self.environment
            .get_template(NAME)
            .and_then(|template| template.render(Value::from_pairs(variables)))
            .map_err(|error| {
                // A template's own refusal is all the client needs; other failures keep their place.
                let detail = error.detail().unwrap_or_default();
                TextError::Template(match (error.kind(), detail) {
                    (ErrorKind::InvalidOperation, detail) if !detail.is_empty() => detail.into(),
                    _ => error.to_string(),
                })
            })
    }
}

/// `tojson` as `transformers` has it: nothing escaped for HTML, `indent` as in Python.
#[allow(clippy::needless_pass_by_value)] // a filter's signature
fn tojson(value: &Value, kwargs: Kwargs) -> Result<Value, Error> {
    let failed = |error: serde_json::Error| {
        Error::new(ErrorKind::InvalidOperation, "tojson failed").with_source(error)
    };
    let indent: Option<usize> = kwargs.get("indent")?;
    let text = match indent {
        None => {
            let mut out = Vec::new();
            value
                .serialize(&mut serde_json::Serializer::with_formatter(
                    &mut out, Python,
                ))
                .map_err(failed)?;
            out
        }
        Some(indent) => {
            let mut out = Vec::new();
            let spaces = " ".repeat(indent);
            let formatter = serde_json::ser::PrettyFormatter::with_indent(spaces.as_bytes());
            value
                .serialize(&mut serde_json::Serializer::with_formatter(
                    &mut out, formatter,
                ))
                .map_err(failed)?;
            out
        }
    };
    let text = String::from_utf8(text).expect("serde_json writes UTF-8");
    Ok(Value::from_safe_string(text))
}

/// Writes JSON as Python's `json.dumps` does: a space behind `,` and `:`.
struct Python;

impl serde_json::ser::Formatter for Python {
    fn begin_array_value<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }
    fn begin_object_key<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }
    fn begin_object_value<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
    ) -> std::io::Result<()> {
        writer.write_all(b": ")
    }
}

/// C's `strftime` at `unix_s`, UTC, for the codes that templates use; others stay as they are.
fn strftime(format: &str, unix_s: u64) -> String {
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    const DAYS: [&str; 7] = [
        "Sunday",
        "Monday",
        "Tuesday",
        "Wednesday",
        "Thursday",
        "Friday",
        "Saturday",
    ];
    let days = unix_s / 86_400;
    let (year, month, day) = civil(days);
    let second = unix_s % 86_400;
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let month_name = MONTHS[to_usize(month) - 1];
    // 1970-01-01 was a Thursday.
    let day_name = DAYS[to_usize((days + 4) % 7)];
    let mut out = String::with_capacity(format.len() + 16);
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let two = |number: u64| format!("{number:02}");
        let shown = match chars.next() {
            Some('Y') => year.to_string(),
            Some('y') => two(year % 100),
            Some('m') => two(month),
            Some('d') => two(day),
            Some('B') => month_name.into(),
            Some('b') => month_name[..3].into(),
            Some('A') => day_name.into(),
            Some('a') => day_name[..3].into(),
            Some('H') => two(hour),
            Some('M') => two(minute),
            Some('S') => two(second),
            Some('%') | None => "%".into(),
            Some(other) => format!("%{other}"),
        };
        out.push_str(&shown);
    }
    out
}

/// Year, month and day of a day counted from 1970-01-01, in the Gregorian calendar.
fn civil(mut days: u64) -> (u64, u64, u64) {
    let leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    // 400 years have 146,097 days, whatever year they begin with.
    let mut year = 1970 + days / 146_097 * 400;
    days %= 146_097;
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let lengths = [
        31,
        28 + u64::from(leap(year)),
        31,
        30,
        31,
        30,
        31,
        31,
        30,
        31,
        30,
        31,
    ];
    let mut month = 0;
    while days >= lengths[month] {
        days -= lengths[month];
        month += 1;
    }
    (year, month as u64 + 1, days + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(source: &str, messages: &[(&str, &str)]) -> Result<String, String> {
        let messages: Vec<Message<'_>> = messages
            .iter()
            .map(|&(role, content)| Message::new(role, content))
            .collect();
        ChatTemplate::new(source.into(), Some("<s>".into()), Some("</s>".into()))
            .and_then(|template| {
                template.render(
                    &messages,
                    &ChatOptions {
                        add_generation_prompt: true,
                        continue_final_message: false,
                        tools: &[],
                        template_kwargs: &[("thinking".into(), false.into())],
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

    #[test]
    fn a_template_can_refuse() {
        let source =
            "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}";
        assert_eq!(
            render(source, &[("system", "x")]).unwrap_err(),
            "the chat template refused the messages: user first"
        );
        assert!(
            render("{% if %}", &[])
                .unwrap_err()
                .starts_with("the chat template cannot be parsed")
        );
    }

    #[test]
    fn json_is_written_as_python_writes_it() {
        assert_eq!(
            render("{{ {'a': [1, '<b>']} | tojson }}", &[]).unwrap(),
            r#"{"a": [1, "<b>"]}"#
        );
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        // `date --utc --date @N +FORMAT`
        for (unix_s, shown) in [
            (0, "Thu 01 January 1970 00:00:00"),
            (951_782_400, "Tue 29 February 2000 00:00:00"),
            (1_783_000_000, "Thu 02 July 2026 13:46:40"),
            (4_107_542_400, "Mon 01 March 2100 00:00:00"),
        ] {
            assert_eq!(strftime("%a %d %B %Y %H:%M:%S", unix_s), shown);
        }
        assert_eq!(strftime("%b %y %% %q %", 0), "Jan 70 % %q %");
    }
}
