//! Step times from a grid of measured passes.

use std::sync::Arc;

use slipstream_base::SimTime;
use slipstream_base::width::round_u64;
use thiserror::Error;

use super::{StepLoad, StepTime};

#[cfg(feature = "parquet")]
mod parquet;

/// Columns that may be axes, in the order in which the grid is stored.
const AXES: [&str; 4] = [
    "prefill_tokens",
    "prefill_context",
    "decode_sequences",
    "decode_context",
];
/// The last of them.
const CONTEXT: usize = AXES.len() - 1;
const VALUE: &str = "step_us";
/// Larger grids are refused: 8 bytes a point.
const POINTS_MAX: usize = 1 << 22;

/// A grid of measured passes, interpolated linearly along each axis.
///
/// A CSV file with a header (or, with the feature `parquet`, a Parquet file) names some of the axes, and `step_us`:
///
/// | column | meaning |
/// | --- | --- |
/// | `prefill_tokens` | prompt tokens computed in the pass |
/// | `prefill_context` | tokens already in the cache, mean over the sequences in prefill |
/// | `decode_sequences` | sequences that decode |
/// | `decode_context` | tokens attended to, mean over the sequences that decode |
/// | `step_us` | length of the pass, µs |
///
/// The rows form a full grid, in any order: one for every combination of the values of the axes.
/// The context of no sequence may be left out: where `decode_sequences` is 0, one row stands for every
/// `decode_context`, and likewise for prefill. Below an axis' first value its first value is
/// taken; beyond its last, the last two are continued in a straight line, but never below the
/// shortest measured step, as a falling line would pass 0. Both are
/// [extrapolation](StepTime::extrapolates).
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    /// Shared, so that the engines of a pool read the same memory.
    grid: Arc<Grid>,
    /// By axis, the cell in which the last pass lay: the next one mostly lies there, too.
    cells: [usize; 4],
}

#[derive(Debug, PartialEq)]
struct Grid {
    axes: [Axis; 4],
    /// Row-major over `axes`, ns.
    points: Vec<f64>,
    /// The smallest of them.
    shortest: f64,
}

/// Values of an axis, rising, at least one; an axis that is not in the file has the value 0.
#[derive(Debug, PartialEq)]
struct Axis {
    values: Vec<f64>,
    /// Distance in `points` of two neighbors along it; 1 for the last axis.
    stride: usize,
    /// Range of the measured values; of an axis that is not in the file, all numbers.
    first: f64,
    last: f64,
}

impl Axis {
    /// Index of the cell that holds `x` (or is nearest), and the position of `x` along it; the cell `last` is looked
    /// at first.
    #[inline]
    fn locate(&self, x: f64, last: &mut usize) -> (usize, f64) {
        let values = &*self.values;
        let [first, .., _] = values else {
            return (0, 0.0);
        };
        if x <= *first {
            return (0, 0.0);
        }
        let end = values.len() - 2;
        let holds = |cell: usize| values[cell] <= x && (x < values[cell + 1] || cell == end);
        if !holds(*last) {
            *last = (values.partition_point(|v| *v <= x) - 1).min(end);
        }
        let (low, high) = (values[*last], values[*last + 1]);
        (*last, (x - low) / (high - low))
    }
}

/// Why a CSV was refused. Mend the file; nothing was built.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum TableError {
    /// The file has no rows.
    #[error("{file}: no rows; a header with `step_us` and a row for each measured pass are needed")]
    Empty {
        /// Name of the file.
        file: String,
    },
    /// A line is malformed.
    #[error("{file}:{line}: {message}")]
    Line {
        /// Name of the file.
        file: String,
        /// Line, from 1.
        line: u64,
        /// The error, as a sentence.
        message: String,
    },
    /// The file is not Parquet, as its name says, or this build has no Parquet.
    #[error("{file}: {message}")]
    Parquet {
        /// Name of the file.
        file: String,
        /// The error, as a sentence.
        message: String,
    },
    /// Rows of the grid are missing.
    #[error("{file}: the grid lacks {count} of its {total} rows, the first of them {first}")]
    Missing {
        /// Name of the file.
        file: String,
        /// How many rows are missing.
        count: usize,
        /// How many there should be.
        total: usize,
        /// The first missing one: `prefill_tokens=0, decode_sequences=64`.
        first: String,
    },
}

impl Table {
    /// Reads a CSV file; `file` is its name in messages. Lines that start with `#` are comments.
    ///
    /// # Errors
    /// If the header has no `step_us` or a column that is none of the axes, a field is not a number
    /// of 0 or more, a combination comes twice, or one is missing.
    pub fn parse(file: &str, text: &[u8]) -> Result<Table, TableError> {
        let bad = |line: u64, message: String| TableError::Line {
            file: file.to_owned(),
            line,
            message,
        };
        let mut reader = csv::ReaderBuilder::new()
            .comment(Some(b'#'))
            .trim(csv::Trim::All)
            .flexible(true)
            .from_reader(text);
        let at = |error: &csv::Error| error.position().map_or(1, csv::Position::line);
        let header = reader
            .headers()
            .map_err(|e| bad(at(&e), e.to_string()))?
            .clone();
        if header.is_empty() {
            return Err(TableError::Empty {
                file: file.to_owned(),
            });
        }
        let header_line = header.position().map_or(1, csv::Position::line);
        let mut columns = Vec::with_capacity(header.len());
        for name in &header {
            let column = match AXES.iter().position(|axis| *axis == name) {
                Some(axis) => axis,
                None if name == VALUE => AXES.len(),
                None => {
                    let known = AXES.join(", ");
                    return Err(bad(
                        header_line,
                        format!("unknown column `{name}`; known are {known}, {VALUE}"),
                    ));
                }
            };
            if columns.contains(&column) {
                return Err(bad(header_line, format!("column `{name}` comes twice")));
            }
            columns.push(column);
        }
        if !columns.contains(&AXES.len()) {
            return Err(bad(header_line, format!("no column `{VALUE}`")));
        }
        let mut rows: Vec<Row> = Vec::new();
        for record in reader.records() {
            let record = record.map_err(|e| bad(at(&e), e.to_string()))?;
            let line = record.position().map_or(0, csv::Position::line);
            rows.push(Row::read(&record, &header, &columns, line).map_err(|m| bad(line, m))?);
        }
        if rows.is_empty() {
            return Err(TableError::Empty {
                file: file.to_owned(),
            });
        }
        Table::build(file, &rows)
    }

    /// Reads a Parquet file with the columns that a CSV file would have. In messages, its rows are
    /// the lines of that CSV file: row 1 is line 2.
    ///
    /// # Errors
    /// As [`Table::parse`]; [`TableError::Parquet`] if the file is not Parquet or the build is
    /// without.
    pub fn parse_parquet(file: &str, bytes: Vec<u8>) -> Result<Table, TableError> {
        let refused = |message: String| TableError::Parquet {
            file: file.to_owned(),
            message,
        };
        #[cfg(feature = "parquet")]
        {
            let csv = parquet::as_csv(bytes).map_err(refused)?;
            Table::parse(file, &csv)
        }
        #[cfg(not(feature = "parquet"))]
        {
            drop(bytes);
            Err(refused(
                "this `slipstream` was built without Parquet; give a CSV file, or build with \
                 `cargo build --release --features parquet`"
                    .to_owned(),
            ))
        }
    }

    fn build(file: &str, rows: &[Row]) -> Result<Table, TableError> {
        let mut axes = axes_of(rows);
        let total = axes
            .iter()
            .fold(1usize, |n, axis| n.saturating_mul(axis.values.len()));
        if total > POINTS_MAX {
            return Err(TableError::Line {
                file: file.to_owned(),
                line: 1,
                message: format!("a grid of {total} points is too large; at most {POINTS_MAX}"),
            });
        }
        let mut stride = 1;
        for axis in axes.iter_mut().rev() {
            axis.stride = stride;
            stride *= axis.values.len();
        }
        let mut points = vec![f64::NAN; total];
        let mut lines = vec![0u64; total];
        for row in rows {
            let mut at = row.at;
            for (axis, Axis { values, .. }) in axes.iter().enumerate() {
                if nobodys(axis, &at) && !values.contains(&at[axis]) {
                    at[axis] = values[0];
                }
            }
            let index = index_of(&at, &axes);
            if lines[index] != 0 {
                return Err(TableError::Line {
                    file: file.to_owned(),
                    line: row.line,
                    message: format!(
                        "{} stands on line {} already",
                        show(&row.at, &axes),
                        lines[index]
                    ),
                });
            }
            points[index] = row.step_ns;
            lines[index] = row.line;
        }
        let missing = fill_unused(&axes, &lines, &mut points);
        match missing.first() {
            None => Ok(Table {
                grid: Arc::new(Grid {
                    shortest: points.iter().copied().fold(f64::INFINITY, f64::min),
                    axes,
                    points,
                }),
                cells: [0; 4],
            }),
            Some(first) => Err(TableError::Missing {
                file: file.to_owned(),
                count: missing.len(),
                total,
                first: show(first, &axes),
            }),
        }
    }

    /// The pass at `at`, ns.
    fn interpolate(&mut self, at: [f64; 4]) -> f64 {
        let corners = self.corners_of(&at);
        self.interpolate_along(&corners, at[CONTEXT])
    }

    /// The corners of the cell of a pass along all axes but the last.
    fn corners_of(&mut self, at: &[f64; 4]) -> Corners {
        let mut corners = Corners {
            all: [(0, 1.0); 1 << CONTEXT],
            count: 1,
        };
        let axes = self.grid.axes[..CONTEXT].iter();
        for ((axis, &x), last) in axes.zip(at).zip(&mut self.cells) {
            let (cell, along) = axis.locate(x, last);
            let (low, high) = corners.all.split_at_mut(corners.count);
            for ((index, weight), high) in low.iter_mut().zip(high) {
                *index += cell * axis.stride;
                *high = (*index + axis.stride, *weight * along);
                *weight *= 1.0 - along;
            }
            // Where it lies on a value the other corners count nothing.
            if along != 0.0 {
                corners.count *= 2;
            }
        }
        corners
    }

    /// The pass whose decodes have this context in the mean, ns.
    #[inline]
    fn interpolate_along(&mut self, corners: &Corners, context: f64) -> f64 {
        let Grid {
            axes,
            points,
            shortest,
        } = &*self.grid;
        let axis = &axes[CONTEXT];
        let (cell, along) = axis.locate(context, &mut self.cells[CONTEXT]);
        let corners = &corners.all[..corners.count];
        let mut sum = 0.0;
        for &(index, weight) in corners {
            sum += weight * (1.0 - along) * points[index + cell];
        }
        if along != 0.0 {
            for &(index, weight) in corners {
                sum += weight * along * points[index + cell + 1];
            }
        }
        sum.max(*shortest)
    }
}

/// Corners of a cell, each with its weight: places in the grid with the first value of the last axis.
struct Corners {
    all: [(usize, f64); 1 << CONTEXT],
    count: usize,
}

impl StepTime for Table {
    #[inline]
    fn step_ns(&mut self, load: &StepLoad) -> u64 {
        round_u64(self.interpolate(place_of(load)))
    }

    fn decode_ends(&mut self, now: SimTime, load: &StepLoad, passes: u32, ends: &mut Vec<SimTime>) {
        let at = place_of(load);
        let corners = self.corners_of(&at);
        let (mut end, mut load) = (now, *load);
        for _ in 0..passes {
            let context = mean(load.decode_context, load.decode_sequences);
            end += round_u64(self.interpolate_along(&corners, context));
            ends.push(end);
            load = load.next_decode();
        }
    }

    fn copy(&self) -> Option<Box<dyn StepTime>> {
        Some(Box::new(self.clone()))
    }

    fn has_range(&self) -> bool {
        true
    }

    fn extrapolates(&self, load: &StepLoad) -> bool {
        let at = place_of(load);
        let mut axes = self.grid.axes.iter().zip(at).enumerate();
        axes.any(|(axis, (of, x))| !(nobodys(axis, &at) || of.first <= x && x <= of.last))
    }
}

/// Position of a pass on the axes.
fn place_of(load: &StepLoad) -> [f64; 4] {
    let cached = load.prefill_context - load.prefill_tokens;
    [
        load.prefill_tokens as f64,
        mean(cached, load.prefill_sequences),
        f64::from(load.decode_sequences),
        mean(load.decode_context, load.decode_sequences),
    ]
}

#[inline]
fn mean(sum: u64, count: u32) -> f64 {
    if count == 0 {
        0.0
    } else {
        sum as f64 / f64::from(count)
    }
}

/// The values of each axis, in order. Those of combinations that cannot occur count if there are no others.
fn axes_of(rows: &[Row]) -> [Axis; 4] {
    std::array::from_fn(|axis| {
        let of_somebody = |row: &&Row| !nobodys(axis, &row.at);
        let mut values: Vec<f64> = rows
            .iter()
            .filter(of_somebody)
            .map(|row| row.at[axis])
            .collect();
        if values.is_empty() {
            values = rows.iter().map(|row| row.at[axis]).collect();
        }
        values.sort_by(f64::total_cmp);
        values.dedup();
        let (mut first, mut last) = (values[0], values[values.len() - 1]);
        if first == 0.0 && last == 0.0 {
            (first, last) = (f64::NEG_INFINITY, f64::INFINITY);
        }
        Axis {
            values,
            stride: 0,
            first,
            last,
        }
    })
}

/// Place of a point in the grid of `axes`.
fn index_of(at: &[f64; 4], axes: &[Axis; 4]) -> usize {
    at.iter().zip(axes).fold(0, |index, (x, axis)| {
        index * axis.values.len() + axis.values.partition_point(|v| v < x)
    })
}

/// Gives points that cannot occur the time of another one. Returns those that no row has. `lines` are the lines of the rows
/// by point; 0: none.
fn fill_unused(axes: &[Axis; 4], lines: &[u64], points: &mut [f64]) -> Vec<[f64; 4]> {
    // The context of no sequence: any row with the same sequences will do.
    let mut missing = Vec::new();
    for at in combinations(axes) {
        if lines[index_of(&at, axes)] != 0 {
            continue;
        }
        let mut stands_in = None;
        for axis in (0..AXES.len()).filter(|axis| nobodys(*axis, &at)) {
            let other = axes[axis].values.iter().find_map(|value| {
                let mut other = at;
                other[axis] = *value;
                (lines[index_of(&other, axes)] != 0).then(|| points[index_of(&other, axes)])
            });
            stands_in = stands_in.or(other);
        }
        match stands_in {
            Some(step_ns) => points[index_of(&at, axes)] = step_ns,
            None => missing.push(at),
        }
    }
    missing
}

/// Whether `axis` is the context of sequences of which `at` has none.
fn nobodys(axis: usize, at: &[f64; 4]) -> bool {
    matches!(axis, 1 | 3) && at[axis - 1] == 0.0
}

struct Row {
    at: [f64; 4],
    step_ns: f64,
    line: u64,
}

impl Row {
    fn read(
        record: &csv::StringRecord,
        header: &csv::StringRecord,
        columns: &[usize],
        line: u64,
    ) -> Result<Row, String> {
        if record.len() != columns.len() {
            return Err(format!(
                "{} fields, but the header has {}",
                record.len(),
                columns.len()
            ));
        }
        let (mut at, mut step_ns) = ([0.0; 4], 0.0);
        for ((text, name), column) in record.iter().zip(header).zip(columns) {
            let value: f64 = text
                .parse()
                .ok()
                // 1e12 us are 11 days, and 1e12 tokens more than any cache: a slip.
                .filter(|value| (0.0..=1e12).contains(value))
                .ok_or_else(|| {
                    format!("`{name}` is \"{text}\", but must be a number from 0 to 1e12")
                })?;
            match at.get_mut(*column) {
                Some(axis) => *axis = value,
                None => step_ns = value * 1e3,
            }
        }
        Ok(Row { at, step_ns, line })
    }
}

fn combinations(axes: &[Axis; 4]) -> impl Iterator<Item = [f64; 4]> + '_ {
    let total: usize = axes.iter().map(|axis| axis.values.len()).product();
    (0..total).map(move |mut index| {
        let mut at = [0.0; 4];
        for axis in (0..4).rev() {
            let count = axes[axis].values.len();
            at[axis] = axes[axis].values[index % count];
            index /= count;
        }
        at
    })
}

/// A place in the grid, leaving out axes with one value.
fn show(at: &[f64; 4], axes: &[Axis; 4]) -> String {
    let parts: Vec<String> = AXES
        .iter()
        .zip(at)
        .zip(axes)
        .filter(|(_, axis)| axis.values.len() > 1)
        .map(|((name, value), _)| format!("{name}={value}"))
        .collect();
    if parts.is_empty() {
        "this pass".into()
    } else {
        parts.join(", ")
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn load(prefills: &[(u32, u32)], decodes: &[u32]) -> StepLoad {
        let mut load = StepLoad::default();
        for &(context, chunk) in prefills {
            load.add_prefill(context, chunk);
        }
        for &context in decodes {
            load.add_decode(context, context);
        }
        load
    }

    const GRID: &str = "\
# prefill 0, 1000; decode 0, 10, 20; context 100, 300
prefill_tokens,decode_sequences,decode_context,step_us
0,0,0,10
1000,0,0,110
0,10,100,20
0,10,300,40
0,20,100,30
0,20,300,70
1000,10,100,120
1000,10,300,140
1000,20,100,130
1000,20,300,170
";

    #[test]
    fn points_of_the_grid_come_back_and_others_lie_between() {
        let empty = Table::parse("g.csv", b"").unwrap_err();
        assert_eq!(
            empty,
            TableError::Empty {
                file: "g.csv".into()
            }
        );
        // The context of no sequence may be one of the axis' values, or another.
        let text = GRID.replace(",0,0,", ",0,300,");
        let mut table = Table::parse("g.csv", text.as_bytes()).unwrap();
        assert_eq!(table, Table::parse("g.csv", GRID.as_bytes()).unwrap());
        let mut check = |prefills: &[(u32, u32)], decodes: &[u32], us: u64| {
            assert_eq!(
                table.step_ns(&load(prefills, decodes)),
                us * 1000,
                "{prefills:?} {decodes:?}"
            );
        };
        check(&[], &[100; 10], 20);
        check(&[(0, 1000)], &[300; 20], 170);
        check(&[(0, 1000)], &[], 110);
        check(&[], &[200; 10], 30); // between contexts
        check(&[], &[200; 15], 40); // between both
        check(&[(0, 500), (7, 500)], &[200; 15], 140);
        check(&[(0, 500)], &[100; 10], 70);
        check(&[], &[50; 10], 20); // below the first context: as at the first
        check(&[(0, 2000)], &[100; 10], 220); // beyond the last: on in a line
        check(&[], &[500; 20], 110);
    }

    #[test]
    fn what_lies_outside_the_grid_is_known() {
        let table = Table::parse("g.csv", GRID.as_bytes()).unwrap();
        assert!(table.has_range());
        for (prefills, decodes, outside) in [
            (&[][..], &[100; 10][..], false),
            (&[(0, 1000)], &[300; 20], false),
            (&[(0, 1000)], &[], false),       // the context of no sequence
            (&[(7, 500)], &[200; 15], false), // no axis of the grid is the context of prefill
            (&[], &[99; 10], true),
            (&[], &[301; 10], true),
            (&[], &[100; 21], true),
            (&[(0, 1001)], &[100; 10], true),
        ] {
            let load = load(prefills, decodes);
            assert_eq!(table.extrapolates(&load), outside, "{load:?}");
        }
        // An axis of one value has that range; one that is not named has none.
        let one = "decode_sequences,decode_context,step_us\n1,100,5\n8,100,9\n";
        let one = Table::parse("g.csv", one.as_bytes()).unwrap();
        assert!(one.extrapolates(&load(&[], &[101; 8])));
        assert!(!one.extrapolates(&load(&[(0, 70)], &[100; 8])));
    }

    #[test]
    fn a_falling_line_stops_at_the_shortest_measured_step() {
        let text = "decode_sequences,step_us\n1,90\n2,50\n3,30\n";
        let mut table = Table::parse("g.csv", text.as_bytes()).unwrap();
        for (sequences, us) in [(2, 50), (3, 30), (4, 30), (5, 30), (1000, 30)] {
            let load = load(&[], &vec![10; sequences]);
            assert_eq!(table.step_ns(&load), us * 1000, "{sequences} sequences");
        }
    }

    #[test]
    fn the_example_of_the_document_is_a_table() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../docs/step-time.md");
        let document = std::fs::read_to_string(path).unwrap();
        let csv = document
            .split("```csv\n")
            .nth(1)
            .unwrap()
            .split("```")
            .next()
            .unwrap();
        let mut table = Table::parse("step-time.md", csv.as_bytes()).unwrap();
        assert_eq!(table.step_ns(&load(&[], &[1024; 64])), 9_400_000);
    }

    #[cfg(not(feature = "parquet"))]
    #[test]
    fn parquet_in_a_build_without_says_how_to_get_it() {
        let error = Table::parse_parquet("g.parquet", Vec::new()).unwrap_err();
        assert!(error.to_string().contains("--features parquet"), "{error}");
    }

    #[test]
    fn an_axis_that_is_not_named_does_not_count() {
        let mut table =
            Table::parse("g.csv", b"step_us , decode_sequences\n 5,1\n 10,2\n").unwrap();
        assert_eq!(table.step_ns(&load(&[(0, 999)], &[1; 3])), 15_000);
        let mut one = Table::parse("g.csv", b"step_us\n7.5\n").unwrap();
        assert_eq!(one.step_ns(&load(&[(0, 999)], &[1; 3])), 7_500);
    }

    #[test]
    fn malformed_files_are_refused_by_line() {
        let cases: &[(&str, &str)] = &[
            ("step_us\n", "no rows"),
            ("a,step_us\n1,2\n", "g.csv:1: unknown column `a`"),
            ("prefill_tokens\n1\n", "g.csv:1: no column `step_us`"),
            (
                "step_us,step_us\n1,1\n",
                "g.csv:1: column `step_us` comes twice",
            ),
            (
                "# c\ndecode_sequences,step_us\n1,2\n2\n",
                "g.csv:4: 1 fields, but the header has 2",
            ),
            (
                "decode_sequences,step_us\n1,2\n2,x\n",
                "g.csv:3: `step_us` is \"x\"",
            ),
            (
                "decode_sequences,step_us\n1,-2\n",
                "g.csv:2: `step_us` is \"-2\"",
            ),
            (
                "decode_sequences,step_us\nnan,2\n",
                "g.csv:2: `decode_sequences` is \"nan\"",
            ),
            (
                "decode_sequences,step_us\n1,2\n3,4\n1,5\n",
                "g.csv:4: decode_sequences=1 stands on line 2 already",
            ),
            (
                "prefill_tokens,decode_sequences,step_us\n0,1,5\n0,2,6\n9,1,7\n",
                "lacks 1 of its 4 rows, the first of them prefill_tokens=9, decode_sequences=2",
            ),
        ];
        for (text, part) in cases {
            let error = Table::parse("g.csv", text.as_bytes())
                .unwrap_err()
                .to_string();
            assert!(error.contains(part), "{error} for {text:?}");
        }
        let huge: String = (0..3000).map(|i| format!("{i},{i},1\n")).fold(
            "prefill_tokens,decode_sequences,step_us\n".into(),
            |all, row| all + &row,
        );
        let error = Table::parse("g.csv", huge.as_bytes())
            .unwrap_err()
            .to_string();
        assert!(error.contains("too large"), "{error}");
    }

    fn all_corners(grid: &Grid, at: [f64; 4]) -> f64 {
        let cells: [(usize, f64); 4] =
            std::array::from_fn(|axis| grid.axes[axis].locate(at[axis], &mut 0));
        let mut sum = 0.0;
        for corner in 0..1usize << AXES.len() {
            let (mut index, mut weight) = (0, 1.0);
            for (axis, (cell, along)) in cells.iter().enumerate() {
                let high = corner >> axis & 1;
                weight *= if high == 1 { *along } else { 1.0 - *along };
                let last = grid.axes[axis].values.len() - 1;
                index = index * (last + 1) + (cell + high).min(last);
            }
            if weight != 0.0 {
                sum += weight * grid.points[index];
            }
        }
        sum.max(grid.shortest)
    }

    proptest! {
        #[test]
        fn bytes_never_panic(text in "(step_us|decode_sequences|prefill_tokens|[0-9e.,\n#\"-]|\\PC){0,60}") {
            let _ = Table::parse("g.csv", text.as_bytes()).map_err(|e| e.to_string());
        }

        /// Axes along which a pass lies on a value are left out, and cells are tried again: the same bits as the sum over all
        /// corners of cells that are looked for anew.
        #[test]
        fn short_cuts_give_the_same_bits(
            axes in prop::array::uniform4(prop::collection::btree_set(0..12u32, 1..5)),
            seed in any::<u64>(),
            passes in prop::collection::vec(prop::array::uniform4(0..28u32), 1..20),
        ) {
            let mut rows = Vec::new();
            let sizes = axes.each_ref().map(BTreeSet::len);
            for index in 0..sizes.iter().product::<usize>() {
                let mut rest = index;
                let at = std::array::from_fn(|axis| {
                    let value = axes[axis].iter().nth(rest % sizes[axis]).unwrap();
                    rest /= sizes[axis];
                    f64::from(*value)
                });
                let step_ns = 1e3 * slipstream_base::mix::unit(slipstream_base::mix::draw(seed, index as u64));
                rows.push(Row { at, step_ns, line: index as u64 + 2 });
            }
            let mut table = Table::build("g.csv", &rows).unwrap();
            for pass in passes {
                let at = pass.map(|x| f64::from(x) / 2.0);
                let plain = all_corners(&table.grid, at);
                prop_assert_eq!(table.interpolate(at).to_bits(), plain.to_bits());
                let load = load(&[], &[pass[3]].repeat(pass[2] as usize + 1));
                let mut ends = Vec::new();
                table.decode_ends(SimTime(7), &load, 20, &mut ends);
                let (mut end, mut load) = (SimTime(7), load);
                for &found in &ends {
                    end += table.step_ns(&load);
                    prop_assert_eq!(found, end);
                    load = load.next_decode();
                }
                prop_assert_eq!(ends.len(), 20);
            }
        }

        /// Interpolation of a grid sampled from a function linear in each axis gives the function.
        #[test]
        fn multilinear_functions_are_exact(p in 0u32..5000, d in 1u32..300, c in 1u32..5000) {
            let f = |p: f64, d: f64, c: f64| 100.0 + 0.5 * p + 2.0 * d + 0.001 * d * c + 1e-4 * p * d;
            let mut text = String::from("prefill_tokens,decode_sequences,decode_context,step_us\n");
            for p in [0.0, 512.0, 4096.0] {
                for d in [1.0, 64.0, 256.0] {
                    for c in [1.0, 1024.0, 4096.0] {
                        text += &[p, d, c, f(p, d, c)].map(|x| x.to_string()).join(",");
                        text.push('\n');
                    }
                }
            }
            let mut table = Table::parse("g.csv", text.as_bytes()).unwrap();
            let ns = table.step_ns(&load(&[(0, p)], &vec![c; d as usize]));
            let expected = f(f64::from(p), f64::from(d), f64::from(c)) * 1e3;
            prop_assert!((ns as f64 - expected).abs() <= 1.0 + expected * 1e-9);
        }
    }
}
