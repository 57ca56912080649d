//! Jinja2 as Hugging Face's `transformers` configures it, on the engine `minijinja`.
//!
//! - `source`, `literal`: the template's source, rewritten where the engine's grammar has less;
//! - `parts`: whether the template takes a message's content as a list of parts;
//! - `python`: values printed as Python prints them;
//! - `methods`, `strings`, `filters`, `markup`, `checks`, `json`, `format`: functions that templates call;
//! - `objects`: values of their own types.

mod args;
mod checks;
mod filters;
mod format;
mod json;
mod literal;
mod markup;
mod methods;
mod objects;
mod parts;
mod python;
mod source;
mod strings;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind};

pub(super) use objects::{one_text, value};
pub(super) use parts::takes_parts;
pub(super) use source::rewrite;
pub(super) use strings::{TEXT_MAX, too_long};

/// Source of the errors that a template raises itself.
#[derive(Debug, thiserror::Error)]
#[error("raised by the template")]
struct Refusal;

/// Why a template failed.
pub(super) enum Failure {
    /// The template raised an error, with its text, or failed on the request, with the line and the reason.
    Refused(String),
    /// It uses what is not supported: the line and the reason.
    Unsupported(String),
}

/// The reason of `error`, with the line unless the template raised it.
pub(super) fn failure(error: &Error) -> Failure {
    let mut at: Option<&(dyn std::error::Error + 'static)> = Some(error);
    let (mut line, mut unknown) = (None, false);
    while let Some(cause) = at {
        if let Some(inner) = cause.downcast_ref::<Error>() {
            let own = std::error::Error::source(inner);
            if own.is_some_and(<dyn std::error::Error>::is::<Refusal>) {
                return Failure::Refused(inner.detail().unwrap_or_default().to_owned());
            }
            line = line.or(inner.line());
            unknown |= match inner.kind() {
                ErrorKind::UnknownFilter | ErrorKind::UnknownTest | ErrorKind::UnknownFunction => {
                    true
                }
                // Any other method is one of another type than the request has there.
                ErrorKind::UnknownMethod => inner.detail().is_some_and(|detail| {
                    ["encode", "translate"]
                        .iter()
                        .any(|name| detail.ends_with(name))
                }),
                _ => false,
            };
        }
        at = cause.source();
    }
    let reason = match error.detail() {
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    };
    let reason = line.map_or(reason.clone(), |line| format!("line {line}: {reason}"));
    if unknown {
        Failure::Unsupported(reason)
    } else {
        Failure::Refused(reason)
    }
}

/// The reason of `error`, whatever it is.
pub(super) fn reason(error: &Error) -> String {
    match failure(error) {
        Failure::Refused(reason) | Failure::Unsupported(reason) => reason,
    }
}

/// Error of what Jinja2 has and templates here cannot use.
fn unsupported(message: &str) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::UnknownFunction, message.to_owned()))
}

/// An environment without templates, as `_compile_jinja_template` of `transformers` sets it up
/// (`utils/chat_template_utils.py`).
pub(super) fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_syntax(
        SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()
            .expect("the usual delimiters are valid"),
    );
    environment.set_debug(false);
    environment.set_formatter(|out, state, value| {
        let escapes = !matches!(state.auto_escape(), minijinja::AutoEscape::None);
        match value.as_str() {
            _ if escapes && !value.is_safe() => {
                out.write_str(&filters::escape(&python::text(value)))?;
            }
            Some(text) => out.write_str(text)?,
            None => out.write_str(&python::str(value))?,
        }
        Ok(())
    });
    environment.set_unknown_method_callback(methods::call);
    filters::add(&mut environment);
    checks::add(&mut environment);
    environment.remove_global("debug");
    environment.add_function(
        "raise_exception",
        |message: Value| -> Result<Value, Error> {
            let error = Error::new(ErrorKind::InvalidOperation, python::str(&message));
            Err(error.with_source(Refusal))
        },
    );
    environment.add_function("range", range);
    environment.add_function("joiner", objects::joiner);
    environment.add_function("cycler", objects::cycler);
    environment.add_function("dict", objects::dict);
    environment.add_function("namespace", objects::namespace);
    environment.add_function("lipsum", |_: Rest<Value>, _: Kwargs| {
        unsupported("`lipsum` is not supported: its text is random")
    });
    environment
}

/// Python's `range`.
#[allow(clippy::needless_pass_by_value)] // a function's signature
fn range(args: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    kwargs.assert_all_used()?;
    let whole = |value: &Value| match value.kind() {
        ValueKind::Bool => Ok(i64::from(value.is_true())),
        ValueKind::Number if value.is_integer() => Ok(i64::try_from(value.clone())?),
        kind => Err(Error::new(
            ErrorKind::InvalidOperation,
            format!("range() takes whole numbers, not {kind}"),
        )),
    };
    let numbers = args
        .iter()
        .map(whole)
        .collect::<Result<Vec<i64>, Error>>()?;
    let (start, stop, step) = match numbers[..] {
        [stop] => (0, stop, 1),
        [start, stop] => (start, stop, 1),
        [start, stop, step] if step != 0 => (start, stop, step),
        _ => {
            return Err(Error::new(
                ErrorKind::InvalidOperation,
                "range(): wrong arguments",
            ));
        }
    };
    Ok(Value::from_object(objects::Numbers::new(
        start, stop, step,
    )?))
}
