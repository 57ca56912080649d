//! Results as columns in memory, in the layout of Arrow: values, and a bit per row for those that exist.

/// Values of a column. Rows that are absent have any value.
#[derive(Clone, Debug, PartialEq)]
pub enum Values {
    /// Whole numbers.
    U32(Vec<u32>),
    /// Whole numbers.
    U64(Vec<u64>),
    /// Numbers.
    F64(Vec<f64>),
    /// Text: where each row's ends in the bytes, from a leading 0, and the bytes (UTF-8).
    Text(Vec<i64>, Vec<u8>),
}

/// A column.
#[derive(Clone, Debug, PartialEq)]
pub struct Column {
    /// Its name, unique in the table.
    pub name: String,
    /// Its values.
    pub values: Values,
    /// A bit per row that exists, least significant first; `None`: all exist.
    pub present: Option<Vec<u8>>,
    rows: usize,
}

impl Column {
    fn new(name: &str, values: Values) -> Column {
        Column {
            name: name.to_owned(),
            values,
            present: None,
            rows: 0,
        }
    }

    /// An empty column of whole numbers below 2^32.
    pub fn u32(name: &str) -> Column {
        Column::new(name, Values::U32(Vec::new()))
    }

    /// An empty column of whole numbers.
    pub fn u64(name: &str) -> Column {
        Column::new(name, Values::U64(Vec::new()))
    }

    /// An empty column of numbers.
    pub fn f64(name: &str) -> Column {
        Column::new(name, Values::F64(Vec::new()))
    }

    /// An empty column of text.
    pub fn text(name: &str) -> Column {
        Column::new(name, Values::Text(vec![0], Vec::new()))
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Counts a row, and notes whether it exists.
    fn count(&mut self, present: bool) {
        let at = self.rows;
        if !present && self.present.is_none() {
            let mut bits = vec![0xff; at / 8];
            if !at.is_multiple_of(8) {
                bits.push((1 << (at % 8)) - 1);
            }
            self.present = Some(bits);
        }
        if let Some(bits) = &mut self.present {
            if at.is_multiple_of(8) {
                bits.push(0);
            }
            bits[at / 8] |= u8::from(present) << (at % 8);
        }
        self.rows += 1;
    }

    /// Adds a whole number to a column of these.
    ///
    /// # Panics
    /// If the column has other values.
    pub fn push_u32(&mut self, value: Option<u32>) {
        self.count(value.is_some());
        match &mut self.values {
            Values::U32(values) => values.push(value.unwrap_or(0)),
            _ => panic!("`{}` has no u32", self.name),
        }
    }

    /// Adds a whole number to a column of these.
    ///
    /// # Panics
    /// If the column has other values.
    pub fn push_u64(&mut self, value: Option<u64>) {
        self.count(value.is_some());
        match &mut self.values {
            Values::U64(values) => values.push(value.unwrap_or(0)),
            _ => panic!("`{}` has no u64", self.name),
        }
    }

    /// Adds a number to a column of these.
    ///
    /// # Panics
    /// If the column has other values.
    pub fn push_f64(&mut self, value: Option<f64>) {
        self.count(value.is_some());
        match &mut self.values {
            Values::F64(values) => values.push(value.unwrap_or(0.0)),
            _ => panic!("`{}` has no f64", self.name),
        }
    }

    /// Adds a text to a column of these.
    ///
    /// # Panics
    /// If the column has other values.
    pub fn push_text(&mut self, value: Option<&str>) {
        self.count(value.is_some());
        match &mut self.values {
            Values::Text(ends, bytes) => {
                bytes.extend_from_slice(value.unwrap_or_default().as_bytes());
                ends.push(slipstream_base::width::to_i64(bytes.len()));
            }
            _ => panic!("`{}` has no text", self.name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absent_rows_are_the_bits_that_are_not_set() {
        for absent in [0usize, 7, 8, 9, 16] {
            let mut column = Column::u32("n");
            for row in 0..20 {
                column.push_u32((row != absent).then_some(row as u32));
            }
            let bits = column.present.clone().unwrap();
            assert_eq!(bits.len(), 3);
            for row in 0..20 {
                assert_eq!(bits[row / 8] >> (row % 8) & 1 == 1, row != absent, "{row}");
            }
        }
        let mut text = Column::text("t");
        text.push_text(Some("ab"));
        text.push_text(None);
        text.push_text(Some("c"));
        assert_eq!(text.values, Values::Text(vec![0, 2, 2, 3], b"abc".to_vec()));
        assert_eq!((text.rows(), text.present), (3, Some(vec![0b101])));
    }
}
