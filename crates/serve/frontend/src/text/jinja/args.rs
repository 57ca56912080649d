//! Parses arguments of Python's methods and Jinja's filters, positional or by keyword.

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};

/// An argument that is a string.
pub(super) struct Text(Value);

impl std::ops::Deref for Text {
    type Target = str;
    fn deref(&self) -> &str {
        self.0.as_str().unwrap_or_default()
    }
}

impl From<&str> for Text {
    fn from(text: &str) -> Text {
        Text(Value::from(text))
    }
}

/// Arguments of a call.
pub(super) struct Args<'a> {
    places: &'a [Value],
    taken: usize,
    names: Option<Kwargs>,
    /// The called function, for errors.
    call: &'a str,
}

impl<'a> Args<'a> {
    /// Arguments; the last value may hold the keyword arguments.
    pub(super) fn new(args: &'a [Value], call: &'a str) -> Result<Args<'a>, Error> {
        let (places, names) = match args.split_last() {
            Some((last, places)) if last.is_kwargs() => {
                (places, Some(Kwargs::try_from(last.clone())?))
            }
            _ => (args, None),
        };
        Ok(Args {
            places,
            taken: 0,
            names,
            call,
        })
    }

    /// Arguments that the engine has separated.
    pub(super) fn with(
        places: &'a [Value],
        names: Kwargs,
        call: &'a str,
    ) -> Result<Args<'a>, Error> {
        let mut args = Args::new(places, call)?;
        args.names.get_or_insert(names);
        Ok(args)
    }

    /// Returns the next argument, whose name is `name`.
    pub(super) fn next(&mut self, name: &str) -> Option<Value> {
        let at = self.taken;
        self.taken += 1;
        if let Some(value) = self.places.get(at) {
            return Some(value.clone());
        }
        let names = self.names.as_ref()?;
        names.has(name).then(|| names.get(name).ok()).flatten()
    }

    /// Returns the next argument, which is required.
    pub(super) fn need(&mut self, name: &str) -> Result<Value, Error> {
        let call = self.call;
        self.next(name).ok_or_else(|| {
            Error::new(
                ErrorKind::MissingArgument,
                format!("{call}() needs the argument `{name}`"),
            )
        })
    }

    /// Returns the next argument, a string.
    pub(super) fn text(&mut self, name: &str) -> Result<Text, Error> {
        let value = self.need(name)?;
        self.as_text(name, value)
    }

    /// Returns the next argument, a string; `None` if it is absent or Python's `None`.
    pub(super) fn optional_text(&mut self, name: &str) -> Result<Option<Text>, Error> {
        match self.next(name) {
            Some(value) if !value.is_none() => self.as_text(name, value).map(Some),
            _ => Ok(None),
        }
    }

    /// Returns the next argument, a whole number.
    pub(super) fn whole(&mut self, name: &str) -> Result<i64, Error> {
        let value = self.need(name)?;
        self.as_whole(name, &value)
    }

    /// Returns the next argument, a whole number; `None` if it is absent or Python's `None`.
    pub(super) fn optional_whole(&mut self, name: &str) -> Result<Option<i64>, Error> {
        match self.next(name) {
            Some(value) if !value.is_none() => self.as_whole(name, &value).map(Some),
            _ => Ok(None),
        }
    }

    /// Whether the next argument is present and true.
    pub(super) fn flag(&mut self, name: &str) -> bool {
        self.next(name).is_some_and(|value| value.is_true())
    }

    /// Refuses arguments that were not taken.
    pub(super) fn finish(self) -> Result<(), Error> {
        if self.places.len() > self.taken {
            return Err(Error::new(
                ErrorKind::TooManyArguments,
                format!("{}() takes at most {} arguments", self.call, self.taken),
            ));
        }
        self.names.map_or(Ok(()), |names| names.assert_all_used())
    }

    fn as_text(&self, name: &str, value: Value) -> Result<Text, Error> {
        if value.as_str().is_none() {
            return Err(self.wrong(name, "a string", &value));
        }
        Ok(Text(value))
    }

    fn as_whole(&self, name: &str, value: &Value) -> Result<i64, Error> {
        let number = match value.kind() {
            ValueKind::Bool => Some(i64::from(value.is_true())),
            ValueKind::Number if value.is_integer() => value.as_i64(),
            _ => None,
        };
        number.ok_or_else(|| self.wrong(name, "a whole number", value))
    }

    fn wrong(&self, name: &str, wanted: &str, value: &Value) -> Error {
        let (call, kind) = (self.call, value.kind());
        Error::new(
            ErrorKind::InvalidOperation,
            format!("{call}(): `{name}` must be {wanted}, not {kind}"),
        )
    }
}
