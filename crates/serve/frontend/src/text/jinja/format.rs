//! Python's `str.format` and `%`.

use minijinja::value::{DynObject, ValueKind};
use minijinja::{Error, ErrorKind, Value};

use super::python;
use super::strings::{TEXT_MAX, pad};

/// Limit of width and precision.
const WIDTH_MAX: usize = 1 << 16;

fn failed(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

/// How a value is written.
#[derive(Clone, Debug, Default, PartialEq)]
struct Spec {
    fill: Option<char>,
    /// `<`, `>`, `^` or `=`
    align: Option<char>,
    /// `+` or a space
    sign: Option<char>,
    alternate: bool,
    width: usize,
    /// `,` or `_`
    group: Option<char>,
    precision: Option<usize>,
    kind: Option<char>,
}

impl Spec {
    /// `[[fill]align][sign][#][0][width][group][.precision][type]`
    fn parse(text: &str) -> Result<Spec, Error> {
        let mut spec = Spec::default();
        let is_align = |c: &char| matches!(c, '<' | '>' | '^' | '=');
        let mut chars: Vec<char> = text.chars().collect();
        if chars.get(1).is_some_and(is_align) {
            spec.fill = Some(chars[0]);
            spec.align = Some(chars[1]);
            chars.drain(..2);
        } else if chars.first().is_some_and(is_align) {
            spec.align = Some(chars.remove(0));
        }
        let mut chars = chars.into_iter().peekable();
        if let Some(sign) = chars.next_if(|c| matches!(c, '+' | '-' | ' ')) {
            spec.sign = Some(sign).filter(|sign| *sign != '-');
        }
        spec.alternate = chars.next_if_eq(&'#').is_some();
        if chars.next_if_eq(&'0').is_some() && spec.align.is_none() {
            spec.fill = spec.fill.or(Some('0'));
            spec.align = Some('=');
        }
        let number = |chars: &mut std::iter::Peekable<std::vec::IntoIter<char>>| {
            let mut number = None;
            while let Some(digit) = chars.next_if(char::is_ascii_digit) {
                let digit = usize::from(digit as u8 - b'0');
                number = Some(
                    number
                        .unwrap_or(0usize)
                        .saturating_mul(10)
                        .saturating_add(digit),
                );
            }
            number
        };
        spec.width = number(&mut chars).unwrap_or(0);
        spec.group = chars.next_if(|c| matches!(c, ',' | '_'));
        if chars.next_if_eq(&'.').is_some() {
            let precision = number(&mut chars);
            spec.precision = Some(precision.ok_or_else(|| failed("a format needs a precision"))?);
        }
        spec.kind = chars.next();
        if chars.next().is_some() {
            return Err(failed(format!("invalid format `{text}`")));
        }
        spec.check()
    }

    fn check(self) -> Result<Spec, Error> {
        if self.width > WIDTH_MAX || self.precision.is_some_and(|digits| digits > WIDTH_MAX) {
            return Err(failed("the width of a format is too large"));
        }
        Ok(self)
    }

    /// `format(value, spec)`
    fn apply(&self, value: &Value) -> Result<String, Error> {
        if *self == Spec::default() {
            return Ok(python::str(value));
        }
        let wrong = || {
            let kind = self.kind.unwrap_or(' ');
            failed(format!(
                "a value of type {} has no format `{kind}`",
                value.kind()
            ))
        };
        match value.kind() {
            ValueKind::String => {
                if !matches!(self.kind, None | Some('s'))
                    || self.sign.is_some()
                    || self.group.is_some()
                    || self.align == Some('=') && self.fill != Some('0')
                {
                    return Err(wrong());
                }
                let text = value.as_str().unwrap_or_default();
                let keep = self.precision.unwrap_or(usize::MAX);
                let text: String = text.chars().take(keep).collect();
                self.pad("", &text, '<')
            }
            ValueKind::Bool | ValueKind::Number => match self.kind {
                Some('e' | 'E' | 'f' | 'F' | 'g' | 'G' | '%') => self.real(as_float(value)?),
                None | Some('n') if python::is_float(value) => self.real(as_float(value)?),
                _ if python::is_float(value) => Err(wrong()),
                None | Some('b' | 'c' | 'd' | 'o' | 'x' | 'X' | 'n')
                    if self.precision.is_none() =>
                {
                    self.whole(as_whole(value)?)
                }
                _ => Err(wrong()),
            },
            _ => Err(wrong()),
        }
    }

    fn whole(&self, number: i128) -> Result<String, Error> {
        let size = number.unsigned_abs();
        let (prefix, digits) = match self.kind {
            Some('b') => ("0b", format!("{size:b}")),
            Some('o') => ("0o", format!("{size:o}")),
            Some('x') => ("0x", format!("{size:x}")),
            Some('X') => ("0X", format!("{size:X}")),
            Some('c') => {
                let code = u32::try_from(number).ok().and_then(char::from_u32);
                let text = code.ok_or_else(|| failed("the number is not a character code"))?;
                return self.pad("", &text.to_string(), '<');
            }
            _ => ("", size.to_string()),
        };
        let sign = self.sign_of(number < 0).to_owned() + if self.alternate { prefix } else { "" };
        let every = if prefix.is_empty() { 3 } else { 4 };
        self.pad(&sign, &self.grouped(&digits, every), '>')
    }

    fn real(&self, number: f64) -> Result<String, Error> {
        let size = number.abs();
        let upper = matches!(self.kind, Some('E' | 'F' | 'G'));
        let digits = self.precision.unwrap_or(6);
        let mut text = match self.kind {
            _ if !number.is_finite() => python::float(size),
            Some('e' | 'E') => exponent(size, digits),
            Some('f' | 'F') => format!("{size:.digits$}"),
            Some('%') => format!("{:.digits$}", size * 100.0),
            None if self.precision.is_none() => python::float(size),
            kind => general(size, digits.max(1), self.alternate, kind.is_none()),
        };
        if upper {
            text = text.to_uppercase();
        }
        if self.kind == Some('%') {
            text.push('%');
        }
        let end = text
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(text.len());
        let text = self.grouped(&text[..end], 3) + &text[end..];
        self.pad(
            self.sign_of(number.is_sign_negative() && !number.is_nan()),
            &text,
            '>',
        )
    }

    fn sign_of(&self, negative: bool) -> &'static str {
        match self.sign {
            _ if negative => "-",
            Some('+') => "+",
            Some(_) => " ",
            None => "",
        }
    }

    fn grouped(&self, digits: &str, every: usize) -> String {
        let Some(group) = self.group else {
            return digits.to_owned();
        };
        let mut out = String::new();
        for (at, digit) in digits.chars().enumerate() {
            if at > 0 && (digits.len() - at).is_multiple_of(every) {
                out.push(group);
            }
            out.push(digit);
        }
        out
    }

    fn pad(&self, sign: &str, text: &str, default: char) -> Result<String, Error> {
        let fill = self.fill.unwrap_or(' ').to_string();
        let width = i64::try_from(self.width).unwrap_or(0);
        let whole = || [sign, text].concat();
        match self.align.unwrap_or(default) {
            '=' if default == '<' => pad(&whole(), width, &fill, "ljust"),
            '=' => {
                let inner = width - i64::try_from(sign.len()).unwrap_or(0);
                Ok([sign, &pad(text, inner, &fill, "rjust")?].concat())
            }
            '<' => pad(&whole(), width, &fill, "ljust"),
            '>' => pad(&whole(), width, &fill, "rjust"),
            // The odd one goes to the right, unlike in `str.center`.
            _ => {
                let text = whole();
                let missing = self.width.saturating_sub(text.chars().count());
                Ok([
                    &*fill.repeat(missing / 2),
                    &text,
                    &fill.repeat(missing - missing / 2),
                ]
                .concat())
            }
        }
    }
}

fn as_float(value: &Value) -> Result<f64, Error> {
    match value.kind() {
        ValueKind::Bool => Ok(f64::from(u8::from(value.is_true()))),
        ValueKind::Number => f64::try_from(value.clone()),
        kind => Err(failed(format!("a number is needed, not {kind}"))),
    }
}

#[allow(clippy::cast_possible_truncation)] // checked before
fn as_whole(value: &Value) -> Result<i128, Error> {
    match value.kind() {
        ValueKind::Number if !python::is_float(value) => i128::try_from(value.clone()),
        _ => match as_float(value)? {
            number if number.abs() < 1e38 => Ok(number.trunc() as i128),
            _ => Err(failed("the number is too large")),
        },
    }
}

/// `%e`
fn exponent(number: f64, digits: usize) -> String {
    let text = format!("{number:.digits$e}");
    let (digits, exponent) = text.split_once('e').expect("it was written with one");
    let exponent: i32 = exponent.parse().expect("it was written as a number");
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

/// `%g`; `as_float` keeps a digit after the point.
fn general(number: f64, digits: usize, all: bool, as_float: bool) -> String {
    let scientific = exponent(number, digits - 1);
    let (head, tail) = scientific.split_once('e').expect("it was written with one");
    let power: i64 = tail.parse().expect("it was written as a number");
    let most = i64::try_from(digits).unwrap_or(i64::MAX) - i64::from(as_float);
    let short = |text: &str| {
        if all || !text.contains('.') {
            return text.to_owned();
        }
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    };
    if (-4..most.max(i64::from(!as_float))).contains(&power) {
        let places = usize::try_from(i64::try_from(digits).unwrap_or(0) - 1 - power).unwrap_or(0);
        let text = short(&format!("{number:.places$}"));
        if as_float && !text.contains('.') {
            return text + ".0";
        }
        return text;
    }
    format!("{}e{tail}", short(head))
}

/// Positional and keyword arguments.
fn separate(args: &[Value]) -> (&[Value], Option<&Value>) {
    match args.split_last() {
        Some((last, places)) if last.is_kwargs() => (places, Some(last)),
        _ => (args, None),
    }
}

/// `text.format(*args)`
pub(super) fn str_format(text: &str, args: &[Value]) -> Result<String, Error> {
    let (places, names) = separate(args);
    let mut fields = Fields {
        places,
        names,
        next: 0,
    };
    fields.write(text, 2)
}

struct Fields<'a> {
    places: &'a [Value],
    names: Option<&'a Value>,
    next: usize,
}

impl Fields<'_> {
    fn write(&mut self, text: &str, depth: u32) -> Result<String, Error> {
        let mut out = String::new();
        let mut rest = text;
        while let Some(at) = rest.find(['{', '}']) {
            out.push_str(&rest[..at]);
            let found = &rest[at..=at];
            rest = &rest[at + 1..];
            if let Some(escaped) = rest.strip_prefix(found) {
                out.push_str(found);
                rest = escaped;
                continue;
            }
            if found == "}" {
                return Err(failed("single '}' in a format"));
            }
            if depth == 0 {
                return Err(failed("formats are nested too deeply"));
            }
            let mut open = 1;
            let end = rest.find(|c| {
                open += match c {
                    '{' => 1,
                    '}' => -1,
                    _ => 0,
                };
                open == 0
            });
            let end = end.ok_or_else(|| failed("single '{' in a format"))?;
            out.push_str(&self.field(&rest[..end], depth)?);
            if out.len() > TEXT_MAX {
                return Err(failed("the text becomes too long"));
            }
            rest = &rest[end + 1..];
        }
        out.push_str(rest);
        Ok(out)
    }

    fn field(&mut self, field: &str, depth: u32) -> Result<String, Error> {
        // A key in brackets may hold anything.
        let mut inside = false;
        let cut = field.find(|c| {
            inside = match c {
                '[' => true,
                ']' => false,
                _ => inside,
            };
            !inside && matches!(c, '!' | ':')
        });
        let (name, mut rest) = field.split_at(cut.unwrap_or(field.len()));
        let value = self.value(name)?;
        let mut converted = None;
        if let Some(behind) = rest.strip_prefix('!') {
            converted = behind.chars().next();
            rest = &behind[converted.map_or(0, char::len_utf8)..];
        }
        let spec = match rest.strip_prefix(':') {
            Some(spec) if spec.contains(['{', '}']) => self.write(spec, depth - 1)?,
            Some(spec) => spec.to_owned(),
            None if rest.is_empty() => String::new(),
            None => return Err(failed("expected ':' after a conversion")),
        };
        let value = match converted {
            None => value,
            Some('s') => Value::from(python::str(&value)),
            Some('r') => Value::from(python::repr(&value)),
            Some('a') => Value::from(ascii(&python::repr(&value))),
            Some(other) => return Err(failed(format!("unknown conversion `{other}`"))),
        };
        Spec::parse(&spec)?.apply(&value)
    }

    fn value(&mut self, name: &str) -> Result<Value, Error> {
        let cut = name.find(['.', '[']).unwrap_or(name.len());
        let (first, mut path) = name.split_at(cut);
        let place = if first.is_empty() {
            self.next += 1;
            Some(self.next - 1)
        } else {
            first.parse().ok()
        };
        let found = if let Some(place) = place {
            self.places.get(place).cloned()
        } else {
            let names = self.names.and_then(Value::as_object);
            names.and_then(|names| names.get_value(&Value::from(first)))
        };
        let missing = || failed(format!("a format names `{first}`, which was not given"));
        let mut value = found.ok_or_else(missing)?;
        while !path.is_empty() {
            let (key, behind) = if let Some(inner) = path.strip_prefix('[') {
                inner
                    .split_once(']')
                    .ok_or_else(|| failed("missing ']' in a format"))?
            } else {
                let inner = &path[1..];
                inner.split_at(inner.find(['.', '[']).unwrap_or(inner.len()))
            };
            let key = key
                .parse::<usize>()
                .map_or_else(|_| Value::from(key), Value::from);
            value = value.get_item(&key)?;
            path = behind;
        }
        Ok(value)
    }
}

/// With the characters beyond ASCII escaped.
fn ascii(text: &str) -> String {
    text.chars().fold(String::new(), |mut out, c| {
        use std::fmt::Write;
        let code = u32::from(c);
        let _ = match code {
            ..=0x7f => write!(out, "{c}"),
            0x80..=0xff => write!(out, "\\x{code:02x}"),
            0x100..=0xffff => write!(out, "\\u{code:04x}"),
            _ => write!(out, "\\U{code:08x}"),
        };
        out
    })
}

/// `text % operand`, where a tuple holds several operands, and a mapping named ones.
pub(super) fn percent(text: &str, operand: &Value) -> Result<String, Error> {
    let mut operands = Operands::of(operand)?;
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find('%') {
        out.push_str(&rest[..at]);
        let (conversion, behind) = Conversion::parse(&rest[at + 1..])?;
        rest = behind;
        let named = conversion.key.map(|key| operands.named(key)).transpose()?;
        let width = operands.size(conversion.width)?.unwrap_or(0);
        let precision = operands.size(conversion.precision)?;
        if conversion.kind == '%' {
            out.push('%');
            continue;
        }
        let value = match named {
            Some(value) => value,
            None => operands.next()?,
        };
        out.push_str(&conversion.shown(width, precision, &value)?);
        if out.len() > TEXT_MAX {
            return Err(failed("the text becomes too long"));
        }
    }
    out.push_str(rest);
    operands.check_used()?;
    Ok(out)
}

/// The right side of `%`.
struct Operands<'a> {
    operand: &'a Value,
    /// Operands by place, the next one last.
    places: Vec<Value>,
    has_named: bool,
}

impl<'a> Operands<'a> {
    fn of(operand: &'a Value) -> Result<Operands<'a>, Error> {
        let mut places: Vec<Value> = if operand.is_tuple() {
            operand.try_iter()?.collect()
        } else {
            vec![operand.clone()]
        };
        places.reverse();
        Ok(Operands {
            operand,
            places,
            has_named: false,
        })
    }

    fn mapping(&self) -> Option<&DynObject> {
        let is_mapping = self.operand.kind() == ValueKind::Map;
        self.operand.as_object().filter(|_| is_mapping)
    }

    fn next(&mut self) -> Result<Value, Error> {
        let few = || failed("not enough values for a format");
        self.places.pop().ok_or_else(few)
    }

    fn named(&mut self, key: &str) -> Result<Value, Error> {
        let mapping = self.mapping();
        let mapping = mapping.ok_or_else(|| failed("a format with names needs a mapping"))?;
        let found = mapping.get_value(&Value::from(key));
        let missing = || failed(format!("a format names `{key}`, which is missing"));
        let found = found.ok_or_else(missing)?;
        self.has_named = true;
        Ok(found)
    }

    fn size(&mut self, size: Option<Size>) -> Result<Option<i64>, Error> {
        match size {
            None => Ok(None),
            Some(Size::Stated(size)) => Ok(Some(size)),
            Some(Size::Operand) => Ok(self.next()?.as_i64()),
        }
    }

    /// Refuses operands that no conversion used, where Python does.
    fn check_used(&self) -> Result<(), Error> {
        let is_one = self.mapping().is_none() && self.operand.kind() != ValueKind::Seq;
        if self.places.is_empty() || self.has_named || !(self.operand.is_tuple() || is_one) {
            return Ok(());
        }
        Err(failed("not all values were used by a format"))
    }
}

/// A width or a precision.
#[derive(Clone, Copy)]
enum Size {
    Stated(i64),
    /// `*`: the next operand.
    Operand,
}

impl Size {
    /// The size that `text` begins with, and what is behind it.
    fn parse(text: &str) -> (Option<Size>, &str) {
        if let Some(behind) = text.strip_prefix('*') {
            return (Some(Size::Operand), behind);
        }
        let behind = text.trim_start_matches(|c: char| c.is_ascii_digit());
        let digits = &text[..text.len() - behind.len()];
        (digits.parse().ok().map(Size::Stated), behind)
    }
}

/// A conversion of `%`: `(key)`, flags, a width, `.precision`, a letter.
struct Conversion<'t> {
    key: Option<&'t str>,
    flags: &'t str,
    width: Option<Size>,
    precision: Option<Size>,
    kind: char,
}

impl<'t> Conversion<'t> {
    /// The conversion that `text` begins with, behind its `%`, and what is behind it.
    fn parse(mut text: &'t str) -> Result<(Conversion<'t>, &'t str), Error> {
        let mut key = None;
        if let Some(inner) = text.strip_prefix('(') {
            let cut = inner.split_once(')');
            let (name, behind) = cut.ok_or_else(|| failed("missing ')' in a format"))?;
            (key, text) = (Some(name), behind);
        }
        let behind = text.trim_start_matches(['-', '+', ' ', '#', '0']);
        let flags = &text[..text.len() - behind.len()];
        let (width, mut text) = Size::parse(behind);
        let mut precision = None;
        if let Some(behind) = text.strip_prefix('.') {
            let (size, behind) = Size::parse(behind);
            (precision, text) = (size.or(Some(Size::Stated(0))), behind);
        }
        let text = text.trim_start_matches(['h', 'l', 'L']);
        let kind = text.chars().next();
        let kind = kind.ok_or_else(|| failed("incomplete format"))?;
        let conversion = Conversion {
            key,
            flags,
            width,
            precision,
            kind,
        };
        Ok((conversion, &text[kind.len_utf8()..]))
    }

    /// The text of `value`.
    fn shown(&self, width: i64, precision: Option<i64>, value: &Value) -> Result<String, Error> {
        let spec = self.spec(width, precision)?;
        match self.kind {
            's' => spec.text(python::str(value)),
            'r' => spec.text(python::repr(value)),
            'a' => spec.text(ascii(&python::repr(value))),
            kind @ ('o' | 'x' | 'X') if python::is_float(value) => {
                Err(failed(format!("%{kind} needs a whole number")))
            }
            'd' | 'i' | 'u' | 'o' | 'x' | 'X' => spec.whole_of_digits(as_whole(value)?),
            'e' | 'E' | 'f' | 'F' | 'g' | 'G' => spec.real(as_float(value)?),
            'c' => match value.as_str() {
                Some(text) if text.chars().count() == 1 => spec.pad("", text, '>'),
                Some(_) => Err(failed("%c needs one character")),
                None => spec.whole(as_whole(value)?),
            },
            other => Err(failed(format!("unknown format `%{other}`"))),
        }
    }

    fn spec(&self, width: i64, precision: Option<i64>) -> Result<Spec, Error> {
        let left = self.flags.contains('-') || width < 0;
        let is_number = !matches!(self.kind, 's' | 'r' | 'a' | 'c');
        let zero = is_number && !left && self.flags.contains('0');
        let sign = ['+', ' ']
            .into_iter()
            .find(|sign| self.flags.contains(*sign));
        let size = |number: i64| usize::try_from(number.unsigned_abs()).unwrap_or(usize::MAX);
        Spec {
            fill: zero.then_some('0'),
            align: Some(match (zero, left) {
                (true, _) => '=',
                (false, true) => '<',
                (false, false) => '>',
            }),
            sign,
            alternate: self.flags.contains('#'),
            width: size(width),
            group: None,
            precision: precision.map(|digits| size(digits.max(0))),
            kind: Some(match self.kind {
                'i' | 'u' => 'd',
                kind => kind,
            }),
        }
        .check()
    }
}

impl Spec {
    /// A text for `%s` and its like, which have no sign.
    fn text(mut self, text: String) -> Result<String, Error> {
        (self.kind, self.sign) = (None, None);
        self.apply(&Value::from(text))
    }

    /// A whole number with as many digits as the precision at least.
    fn whole_of_digits(mut self, number: i128) -> Result<String, Error> {
        let digits = self.precision.take().unwrap_or(0);
        if digits == 0 {
            return self.whole(number);
        }
        let plain = Spec {
            width: 0,
            ..self.clone()
        };
        let plain = plain.whole(number)?;
        let (sign, number) = match plain.strip_prefix(['-', '+', ' ']) {
            Some(number) => (&plain[..1], number),
            None => ("", &*plain),
        };
        let width = i64::try_from(digits).unwrap_or(0);
        self.pad(sign, &pad(number, width, "0", "rjust")?, '>')
    }
}
