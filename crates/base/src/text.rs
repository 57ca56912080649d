//! Numbers in sentences.

/// A count with thousands separated by commas: `1,234,567`.
pub fn grouped(value: u64) -> String {
    let digits = value.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// A count with its noun: `1 request`, `2,000 requests`, `0 switches`.
///
/// `one` is the singular, whose last word takes the ending: `s`, `es` after a hiss, `ies` for a `y`
/// that follows a consonant.
pub fn counted(value: u64, one: &str) -> String {
    format!("{} {}", grouped(value), several(value, one))
}

/// The noun of [`counted`] alone, for a count that is printed elsewhere.
pub fn several(value: u64, one: &str) -> String {
    if value == 1 {
        return one.to_owned();
    }
    if ["s", "x", "z", "ch", "sh"]
        .iter()
        .any(|end| one.ends_with(end))
    {
        return format!("{one}es");
    }
    match one.strip_suffix('y') {
        Some(stem) if !stem.ends_with(['a', 'e', 'i', 'o', 'u']) => format!("{stem}ies"),
        _ => format!("{one}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_one_and_others_are_several() {
        for (value, one, text) in [
            (1, "shard", "1 shard"),
            (0, "shard", "0 shards"),
            (2, "switch", "2 switches"),
            (1, "switch", "1 switch"),
            (3, "pass", "3 passes"),
            (12_345, "request", "12,345 requests"),
            (2, "entry", "2 entries"),
            (2, "key", "2 keys"),
            (2, "trace line", "2 trace lines"),
            (1_000_000, "GPU", "1,000,000 GPUs"),
        ] {
            assert_eq!(counted(value, one), text);
        }
    }
}
