//! Measured distributions: columns of CSV files.

use std::path::Path;
use std::sync::Arc;

use slipstream_config::workload_file::{Class, Dist};
use slipstream_os::files;

use crate::error::SourceError;

/// Limit of a column's values: 80 MB.
const VALUES_MAX: usize = 10_000_000;

/// Reads the files that the classes' distributions refer to.
pub(crate) fn load(classes: &mut [Class]) -> Result<(), SourceError> {
    // A file of several distributions is read once.
    type Read = (std::path::PathBuf, Option<String>, Arc<[f64]>);
    let mut seen: Vec<Read> = Vec::new();
    for class in classes {
        let session = &mut class.session;
        let own = [
            &mut class.isl,
            &mut class.osl,
            &mut session.turns,
            &mut session.think_time_s,
            &mut session.user_tokens,
        ];
        let prefixes = class.prefix.iter_mut().map(|level| &mut level.tokens);
        for dist in own.into_iter().chain(prefixes) {
            let Dist::Empirical(e) = dist else { continue };
            let known = seen.iter().find(|s| s.0 == e.path && s.1 == e.column);
            e.values = if let Some(known) = known {
                known.2.clone()
            } else {
                let values = read(&e.path, e.column.as_deref())?;
                seen.push((e.path.clone(), e.column.clone(), values.clone()));
                values
            };
        }
    }
    Ok(())
}

/// Limit of a file's bytes: a column of the maximum length, among some others.
const BYTES_MAX: u64 = 256 << 20;

/// A source that fails after this number of bytes: a device would never end.
struct Bounded<R> {
    source: R,
    left: u64,
}

impl<R: std::io::Read> std::io::Read for Bounded<R> {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        let read = self.source.read(out)?;
        if read as u64 > self.left {
            return Err(std::io::Error::other("larger than 256 MiB"));
        }
        self.left -= read as u64;
        Ok(read)
    }
}

fn read(path: &Path, column: Option<&str>) -> Result<Arc<[f64]>, SourceError> {
    let file = files::open_stream(path).map_err(|source| SourceError::Io {
        path: path.to_owned(),
        source,
    })?;
    let file = Bounded {
        source: file,
        left: BYTES_MAX,
    };
    values(file, column).map_err(|(line, what)| SourceError::Values {
        path: path.to_owned(),
        line,
        what,
    })
}

/// The values of a column, or the faulty line and its error.
fn values(source: impl std::io::Read, column: Option<&str>) -> Result<Arc<[f64]>, (u64, String)> {
    let mut csv = csv::ReaderBuilder::new()
        .has_headers(false)
        .trim(csv::Trim::All)
        .from_reader(source);
    let mut values = Vec::new();
    let mut at = 0;
    for (index, record) in csv.records().enumerate() {
        let record = record.map_err(|error| {
            let line = error.position().map_or(0, csv::Position::line);
            (line, error.to_string())
        })?;
        let line = record.position().map_or(0, csv::Position::line);
        if index == 0 {
            if let Some(column) = column {
                let names: Vec<&str> = record.iter().collect();
                at = names.iter().position(|n| *n == column).ok_or_else(|| {
                    let names = names.join(", ");
                    (
                        line,
                        format!("there is no column `{column}`; columns: {names}"),
                    )
                })?;
                continue;
            }
            // Without a column name, a first line that is not a number is a header.
            if record
                .get(0)
                .is_none_or(|text| text.parse::<f64>().is_err())
            {
                continue;
            }
        }
        let text = record.get(at).unwrap_or_default();
        let value = text.parse::<f64>().ok().filter(|v| v.is_finite());
        values.push(value.ok_or_else(|| (line, format!("{text:?} is not a number")))?);
        if values.len() > VALUES_MAX {
            return Err((
                line,
                format!("more than {VALUES_MAX} values; take a sample"),
            ));
        }
    }
    if values.is_empty() {
        return Err((0, "it holds no value".into()));
    }
    Ok(values.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, column: Option<&str>) -> Result<Vec<f64>, String> {
        values(text.as_bytes(), column)
            .map(|values| values.to_vec())
            .map_err(|(line, what)| format!("{line}: {what}"))
    }

    #[test]
    fn a_column_is_read_by_name_or_as_the_first() {
        let text = "input, output\n10, 1\n20, 2\n";
        assert_eq!(check(text, Some("output")).unwrap(), [1.0, 2.0]);
        assert_eq!(check(text, None).unwrap(), [10.0, 20.0]);
        assert_eq!(check("7\n8.5\n", None).unwrap(), [7.0, 8.5]);
    }

    #[test]
    fn what_is_no_number_is_named_by_its_line() {
        for (text, column, says) in [
            ("a\n1\nx\n", None, "3: \"x\" is not a number"),
            ("a,b\n1,2\n", Some("c"), "no column `c`; columns: a, b"),
            ("a\n", Some("a"), "no value"),
            ("", None, "no value"),
            ("a,b\n1\n", Some("a"), "2"),
            ("1\ninf\n", None, "\"inf\" is not a number"),
        ] {
            let error = check(text, column).unwrap_err();
            assert!(error.contains(says), "{error}");
        }
    }
}
