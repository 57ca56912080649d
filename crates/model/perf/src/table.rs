//! Tables of deployments: rows of text with named columns.

use std::sync::Arc;

use thiserror::Error;

/// Why a text is no table of deployments.
#[derive(Debug, Error)]
pub enum TableError {
    /// The text is no CSV, or a row has more or fewer cells than the header.
    #[error(transparent)]
    Csv(#[from] csv::Error),
    /// Two columns have one name.
    #[error("the header has column \"{0}\" more than once")]
    Duplicate(String),
    /// No column of the header is one of a deployment: the text is something else.
    #[error(
        "the first line has no column of a deployment, such as model_path, system, isl and osl; a CSV table with a \
         header is needed (docs/accuracy.md)"
    )]
    NoColumn,
    /// The header is a single cell that contains another separator.
    #[error("the header is a single cell that contains {0}; cells must be separated by commas")]
    Separator(&'static str),
}

/// Columns that `predict` and `calibrate` read, and those of measured tables that neither needs.
const COLUMNS: &[&str] = &[
    "id",
    "backend",
    "backend_version",
    "model_path",
    "system",
    "precision",
    "kv_cache_dtype",
    "mode",
    "isl",
    "osl",
    "gemm_quant_mode",
    "moe_quant_mode",
    "batch_size",
    "tp_size",
    "pp_size",
    "attention_dp_size",
    "moe_tp_size",
    "moe_ep_size",
    "prefill_batch_size",
    "prefill_num_workers",
    "prefill_tp_size",
    "prefill_pp_size",
    "prefill_attention_dp_size",
    "prefill_moe_tp_size",
    "prefill_moe_ep_size",
    "decode_batch_size",
    "decode_num_workers",
    "decode_tp_size",
    "decode_pp_size",
    "decode_attention_dp_size",
    "decode_moe_tp_size",
    "decode_moe_ep_size",
    "ttft_ms",
    "tpot_ms",
    "source",
];

/// Columns of `rows` that no deployment is read from, such as misspelt ones.
pub fn unknown_columns(rows: &[Row]) -> Vec<&str> {
    let columns = rows.first().map_or(&[][..], |row| row.columns.as_slice());
    columns
        .iter()
        .map(String::as_str)
        .filter(|name| !name.is_empty() && !COLUMNS.contains(name))
        .collect()
}

/// A row of a table of deployments, as text.
#[derive(Clone, Debug)]
pub struct Row {
    /// Column `id`, or the number of the row.
    pub id: String,
    cells: Vec<String>,
    columns: Arc<Vec<String>>,
}

impl Row {
    /// The cell of `column`; `None` if it is empty or there is no such column.
    pub fn get(&self, column: &str) -> Option<&str> {
        let at = self.columns.iter().position(|name| name == column)?;
        let cell = self.cells.get(at)?.trim();
        (!cell.is_empty() && !cell.eq_ignore_ascii_case("nan")).then_some(cell)
    }

    /// The number in `column`, if it is one that is finite.
    pub fn number(&self, column: &str) -> Option<f64> {
        self.get(column)?
            .parse()
            .ok()
            .filter(|x: &f64| x.is_finite())
    }
}

/// Reads a CSV table with a header. Lines above the header that start with `#` are comments.
///
/// # Errors
/// If the text is no CSV with a header, a column name is repeated, or a row has more or fewer cells
/// than the header; the message names the line.
pub fn read_rows(text: &[u8]) -> Result<Vec<Row>, TableError> {
    let text = text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(text);
    // Comments become empty lines, which the reader skips but counts in its errors. A `#` below the
    // header may start an id: such a row is data.
    let mut lines = Vec::with_capacity(text.len());
    let mut above = true;
    for line in text.split_inclusive(|byte| *byte == b'\n') {
        if above && line.starts_with(b"#") {
            lines.push(b'\n');
        } else {
            above &= line.trim_ascii().is_empty();
            lines.extend_from_slice(line);
        }
    }
    let mut reader = csv::Reader::from_reader(lines.as_slice());
    let columns: Vec<String> = reader
        .headers()?
        .iter()
        .map(|c| c.trim().to_owned())
        .collect();
    if let [only] = columns.as_slice() {
        if only.contains(';') {
            return Err(TableError::Separator("semicolons"));
        } else if only.contains('\t') {
            return Err(TableError::Separator("tabs"));
        }
    }
    for (at, name) in columns.iter().enumerate() {
        if !name.is_empty() && columns[..at].contains(name) {
            return Err(TableError::Duplicate(name.clone()));
        }
    }
    if !columns.is_empty() && !columns.iter().any(|name| COLUMNS.contains(&name.as_str())) {
        return Err(TableError::NoColumn);
    }
    let columns = Arc::new(columns);
    reader
        .records()
        .enumerate()
        .map(|(index, record)| {
            let cells: Vec<String> = record?.iter().map(str::to_owned).collect();
            let mut row = Row {
                id: String::new(),
                cells,
                columns: columns.clone(),
            };
            row.id = row
                .get("id")
                .map_or_else(|| (index + 1).to_string(), str::to_owned);
            Ok(row)
        })
        .collect()
}
