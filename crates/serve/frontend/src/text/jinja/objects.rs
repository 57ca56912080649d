//! Objects that templates get: generators, ranges, long integers, `joiner` and `cycler`.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use minijinja::value::{Enumerator, Kwargs, Object, ObjectRepr, Rest, Value};
use minijinja::{Error, ErrorKind, State};
use slipstream_structured::{Number, Tree};

use super::args::Args;

fn failed(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

/// `tree` as a template sees it.
pub(crate) fn value(tree: &Tree) -> Value {
    match tree {
        Tree::Null => Value::from(()),
        Tree::Bool(value) => Value::from(*value),
        Tree::Number(number) => integer(number).unwrap_or_else(|| Value::from(number.as_f64())),
        Tree::Text(text) => Value::from(text.as_str()),
        Tree::Array(elements) => elements.iter().map(value).collect(),
        Tree::Object(members) => {
            let members = members.iter();
            Value::from_pairs(members.map(|(name, tree)| (name.as_str(), value(tree))))
        }
    }
}

fn integer(number: &Number) -> Option<Value> {
    if let Some(number) = number.as_i64() {
        return Some(Value::from(number));
    }
    if let Some(number) = number.as_u64() {
        return Some(Value::from(number));
    }
    number.is_integer().then(|| {
        let digits = number.to_string();
        match digits.parse::<i128>() {
            Ok(number) => Value::from(number),
            Err(_) => Value::from_object(LongInteger(digits)),
        }
    })
}

/// An integer of more than 128 bits. Templates can print it, but not calculate with it.
#[derive(Debug)]
pub(super) struct LongInteger(String);

impl LongInteger {
    pub(super) fn digits(&self) -> &str {
        &self.0
    }
}

impl Object for LongInteger {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Elements that are given out once, as a Python generator does: it has no length and is always true.
#[derive(Debug)]
pub(super) struct Generator(Mutex<std::vec::IntoIter<Value>>);

impl Generator {
    pub(super) fn of(elements: Vec<Value>) -> Value {
        Value::from_object(Generator(Mutex::new(elements.into_iter())))
    }
}

impl Object for Generator {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        let elements = self.clone();
        Enumerator::Iter(Box::new(std::iter::from_fn(move || {
            let mut rest = elements.0.lock().unwrap_or_else(PoisonError::into_inner);
            rest.next()
        })))
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        None
    }

    fn is_true(self: &Arc<Self>) -> bool {
        true
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("<generator object>")
    }
}

/// Whether `value` is a generator.
pub(super) fn is_generator(value: &Value) -> bool {
    value.downcast_object_ref::<Generator>().is_some()
}

/// A `range`.
#[derive(Debug)]
pub(super) struct Numbers {
    pub(super) start: i64,
    pub(super) stop: i64,
    pub(super) step: i64,
    pub(super) count: usize,
}

impl Numbers {
    /// `range(start, stop, step)`, with at most as many numbers as Jinja2's sandbox allows.
    pub(super) fn new(start: i64, stop: i64, step: i64) -> Result<Numbers, Error> {
        const MAX: i64 = 100_000;
        let span = if step > 0 {
            stop.saturating_sub(start)
        } else {
            start.saturating_sub(stop)
        };
        let count = match span {
            ..=0 => 0,
            span => (span - 1) / step.saturating_abs() + 1,
        };
        if count > MAX {
            return Err(failed(format!("range(): more than {MAX} numbers")));
        }
        Ok(Numbers {
            start,
            stop,
            step,
            count: usize::try_from(count).unwrap_or(0),
        })
    }

    fn at(&self, place: usize) -> i64 {
        self.start + i64::try_from(place).unwrap_or(0) * self.step
    }

    /// The range of every `step`th number from the place `start` to before the place `stop`.
    pub(super) fn slice(&self, start: i64, stop: i64, step: i64) -> Result<Numbers, Error> {
        let at = |place: i64| self.start.saturating_add(place.saturating_mul(self.step));
        Numbers::new(at(start), at(stop), self.step.saturating_mul(step))
    }
}

impl Object for Numbers {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        if let Some(name) = key.as_str() {
            return Some(Value::from(match name {
                "start" => self.start,
                "stop" => self.stop,
                "step" => self.step,
                _ => return None,
            }));
        }
        let place = key.as_i64()?;
        let place = if place < 0 {
            place + i64::try_from(self.count).ok()?
        } else {
            place
        };
        let place = usize::try_from(place).ok()?;
        (place < self.count).then(|| Value::from(self.at(place)))
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.count)
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (start, stop) = (self.start, self.stop);
        match self.step {
            1 => write!(f, "range({start}, {stop})"),
            step => write!(f, "range({start}, {stop}, {step})"),
        }
    }
}

/// Whether `value` is a `range`.
pub(super) fn is_range(value: &Value) -> bool {
    value.downcast_object_ref::<Numbers>().is_some()
}

/// A group of `groupby`: its key and its elements.
#[derive(Debug)]
struct Group([Value; 2]);

impl Object for Group {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let [grouper, list] = &self.0;
        let found = match (key.as_str(), key.as_i64()) {
            (Some("grouper"), _) | (_, Some(0 | -2)) => grouper,
            (Some("list"), _) | (_, Some(1 | -1)) => list,
            _ => return None,
        };
        Some(found.clone())
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(2)
    }
}

/// A group of `groupby`, with its key and its elements.
pub(super) fn group(key: Value, elements: Value) -> Value {
    Value::from_object(Group([key, elements]))
}

/// Whether `value` is a group of `groupby`.
pub(super) fn is_group(value: &Value) -> bool {
    value.downcast_object_ref::<Group>().is_some()
}

/// What `value` is, if `json.dumps` refuses it although it has elements.
pub(super) fn not_json(value: &Value) -> Option<&'static str> {
    let object = value.as_object()?;
    if is_generator(value) {
        return Some("generator");
    }
    if is_range(value) {
        return Some("range");
    }
    (object.type_name().ends_with("::Namespace")).then_some("namespace")
}

/// `joiner(sep=', ')`: nothing the first time it is called, then the separator.
#[derive(Debug)]
struct Joiner {
    separator: Value,
    used: AtomicBool,
}

impl Object for Joiner {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn call(self: &Arc<Self>, _: &mut State<'_, '_>, args: &[Value]) -> Result<Value, Error> {
        Args::new(args, "a joiner")?.finish()?;
        Ok(if self.used.swap(true, Ordering::Relaxed) {
            self.separator.clone()
        } else {
            Value::from("")
        })
    }
}

#[allow(clippy::needless_pass_by_value)] // a function's signature, as below
pub(super) fn joiner(args: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let mut args = Args::with(&args, kwargs, "joiner")?;
    let separator = args.next("sep").unwrap_or_else(|| Value::from(", "));
    args.finish()?;
    Ok(Value::from_object(Joiner {
        separator,
        used: AtomicBool::new(false),
    }))
}

/// `cycler(*items)`: one of its items after the other.
#[derive(Debug)]
struct Cycler {
    items: Vec<Value>,
    at: AtomicUsize,
}

impl Object for Cycler {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let at = self.at.load(Ordering::Relaxed);
        (key.as_str()? == "current").then(|| self.items[at].clone())
    }

    fn call_method(
        self: &Arc<Self>,
        _: &mut State<'_, '_>,
        method: &str,
        args: &[Value],
    ) -> Result<Value, Error> {
        let next = match method {
            "next" => (self.at.load(Ordering::Relaxed) + 1) % self.items.len(),
            "reset" => 0,
            _ => return Err(ErrorKind::UnknownMethod.into()),
        };
        Args::new(args, method)?.finish()?;
        let before = self.at.swap(next, Ordering::Relaxed);
        Ok(match method {
            "next" => self.items[before].clone(),
            _ => Value::from(()),
        })
    }
}

#[allow(clippy::needless_pass_by_value)]
pub(super) fn cycler(items: Rest<Value>) -> Result<Value, Error> {
    if items.is_empty() {
        return Err(failed("cycler() needs at least one item"));
    }
    Ok(Value::from_object(Cycler {
        items: items.to_vec(),
        at: AtomicUsize::new(0),
    }))
}

/// Python's `dict(…)`: of a mapping or of pairs, and of keyword arguments.
#[allow(clippy::needless_pass_by_value)]
pub(super) fn dict(args: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let mut pairs = match &args[..] {
        [] => Vec::new(),
        [of] => pairs(of)?,
        _ => return Err(failed("dict() takes at most 1 argument")),
    };
    for name in kwargs.args() {
        pairs.push((Value::from(name), kwargs.get(name)?));
    }
    Ok(Value::from_pairs(pairs))
}

/// `namespace(…)`, as [`dict`].
pub(super) fn namespace(args: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let dict = dict(args, kwargs)?;
    minijinja::functions::namespace(Some(dict.into()))
}

fn pairs(of: &Value) -> Result<Vec<(Value, Value)>, Error> {
    if of.is_undefined() {
        return Ok(Vec::new());
    }
    if let (minijinja::value::ValueKind::Map, Some(map)) = (of.kind(), of.as_object()) {
        return Ok(map.try_iter_pairs().into_iter().flatten().collect());
    }
    let pair = |pair: Value| {
        let pair: Vec<Value> = super::filters::elements(&pair)?;
        <[Value; 2]>::try_from(pair)
            .map(|[key, value]| (key, value))
            .map_err(|_| failed("dict() takes pairs"))
    };
    of.try_iter()?.map(pair).collect()
}

/// The argument `name` of a function that has no other, a string.
pub(crate) fn one_text(
    function: &str,
    name: &str,
    args: &[Value],
    kwargs: Kwargs,
) -> Result<String, Error> {
    let mut args = Args::with(args, kwargs, function)?;
    let text = args.text(name)?;
    args.finish()?;
    Ok(text.to_owned())
}
