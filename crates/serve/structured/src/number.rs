//! JSON numbers of any size.

use std::fmt;

use serde::ser::{Serialize, Serializer};

/// A JSON number. Integers that 64 bits do not hold keep their digits, as in Python.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Number(Repr);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Repr {
    Short(serde_json::Number),
    /// As Python's `json` writes it: digits, `NaN`, `Infinity` or `-Infinity`.
    Literal(Box<str>),
}

impl Number {
    /// The number that `literal` writes: an integer, `NaN`, `Infinity` or `-Infinity`. `None` for other texts.
    pub fn of_literal(literal: &str) -> Option<Number> {
        let digits = literal.strip_prefix('-').unwrap_or(literal);
        let known = matches!(literal, "NaN" | "Infinity" | "-Infinity");
        if !known && (digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit())) {
            return None;
        }
        if let Ok(number) = literal.parse::<i64>() {
            return Some(number.into());
        }
        if let Ok(number) = literal.parse::<u64>() {
            return Some(number.into());
        }
        Some(Number(Repr::Literal(literal.into())))
    }

    /// The nearest float.
    pub fn as_f64(&self) -> f64 {
        match &self.0 {
            Repr::Short(number) => number.as_f64().unwrap_or(f64::NAN),
            Repr::Literal(literal) => literal.parse().unwrap_or(f64::NAN),
        }
    }

    /// The number as an integer of 64 bits, if it is one.
    pub fn as_i64(&self) -> Option<i64> {
        match &self.0 {
            Repr::Short(number) => number.as_i64(),
            Repr::Literal(_) => None,
        }
    }

    /// The number as an integer of 64 bits from 0, if it is one.
    pub fn as_u64(&self) -> Option<u64> {
        match &self.0 {
            Repr::Short(number) => number.as_u64(),
            Repr::Literal(_) => None,
        }
    }

    /// Whether it is written as an integer.
    pub fn is_integer(&self) -> bool {
        match &self.0 {
            Repr::Short(number) => !number.is_f64(),
            Repr::Literal(literal) => literal.ends_with(|c: char| c.is_ascii_digit()),
        }
    }
}

impl From<f64> for Number {
    fn from(number: f64) -> Number {
        match serde_json::Number::from_f64(number) {
            Some(number) => Number(Repr::Short(number)),
            None if number.is_nan() => Number(Repr::Literal("NaN".into())),
            None if number > 0.0 => Number(Repr::Literal("Infinity".into())),
            None => Number(Repr::Literal("-Infinity".into())),
        }
    }
}

impl From<i64> for Number {
    fn from(number: i64) -> Number {
        Number(Repr::Short(number.into()))
    }
}

impl From<u64> for Number {
    fn from(number: u64) -> Number {
        Number(Repr::Short(number.into()))
    }
}

impl From<u32> for Number {
    fn from(number: u32) -> Number {
        Number(Repr::Short(number.into()))
    }
}

impl From<i32> for Number {
    fn from(number: i32) -> Number {
        Number(Repr::Short(number.into()))
    }
}

impl From<serde_json::Number> for Number {
    fn from(number: serde_json::Number) -> Number {
        Number(Repr::Short(number))
    }
}

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Repr::Short(number) => number.fmt(f),
            Repr::Literal(literal) => f.write_str(literal),
        }
    }
}

impl Serialize for Number {
    /// Integers of more than 128 bits become floats here; [`Display`](fmt::Display) keeps them.
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match &self.0 {
            Repr::Short(number) => number.serialize(to),
            Repr::Literal(literal) => match (literal.parse::<i128>(), literal.parse::<u128>()) {
                (Ok(number), _) => to.serialize_i128(number),
                (_, Ok(number)) => to.serialize_u128(number),
                _ => to.serialize_f64(self.as_f64()),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn literals_keep_their_digits() {
        let long = "9".repeat(400);
        for literal in [
            "0",
            "-1",
            "18446744073709551615",
            "18446744073709551616",
            "-9223372036854775809",
            &long,
            "NaN",
            "-Infinity",
        ] {
            let number = Number::of_literal(literal).unwrap();
            assert_eq!(number.to_string(), literal);
            assert_eq!(
                number.is_integer(),
                literal.ends_with(|c: char| c.is_ascii_digit())
            );
        }
        assert_eq!(
            Number::of_literal("18446744073709551616").unwrap().as_f64(),
            2f64.powi(64)
        );
        assert_eq!(Number::of_literal("-0").unwrap().to_string(), "0");
        for other in ["", "-", "1.5", "1e5", "+1", "nan", "x"] {
            assert_eq!(Number::of_literal(other), None);
        }
        assert_eq!(Number::from(f64::INFINITY).to_string(), "Infinity");
        assert_eq!(Number::from(-0.0).to_string(), "-0.0");
    }
}
