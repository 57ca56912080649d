//! Parquet, by columns and without Arrow: rows are few enough that its speed does not matter, and
//! Arrow takes minutes to build.

use std::io::Write;
use std::sync::Arc;

use parquet::basic::{Compression, LogicalType, Repetition, Type as Physical};
use parquet::data_type::{ByteArray, ByteArrayType, DataType, DoubleType, Int64Type};
use parquet::errors::Result;
use parquet::file::properties::WriterProperties;
use parquet::file::reader::{ChunkReader, FileReader, SerializedFileReader};
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::record::Field;
use parquet::record::reader::RowIter;
use parquet::schema::types::Type;

use super::{Cell, Column, ColumnType, Value};

/// Rows held in memory before they are written together.
const GROUP_ROWS: usize = 65_536;

pub(super) struct Writer<W: Write + Send> {
    file: SerializedFileWriter<W>,
    columns: Vec<Pending>,
    rows: usize,
}

/// Pending rows of a column: the present values, and which are present (1) or absent (0), as
/// Parquet's definition levels.
struct Pending {
    values: Values,
    present: Vec<i16>,
}

enum Values {
    /// Parquet has no unsigned column; the bits are those of the `u64`, as the schema declares.
    U64(Vec<i64>),
    F64(Vec<f64>),
    Text(Vec<ByteArray>),
}

impl<W: Write + Send> Writer<W> {
    pub(super) fn new(sink: W, columns: &[Column]) -> Result<Writer<W>> {
        let fields = columns
            .iter()
            .map(|column| {
                let (physical, logical) = match column.kind {
                    ColumnType::U64 => (Physical::INT64, Some(LogicalType::integer(64, false))),
                    ColumnType::F64 => (Physical::DOUBLE, None),
                    ColumnType::Text => (Physical::BYTE_ARRAY, Some(LogicalType::String)),
                };
                let field = Type::primitive_type_builder(&column.name, physical)
                    .with_repetition(Repetition::OPTIONAL)
                    .with_logical_type(logical)
                    .build()?;
                Ok(Arc::new(field))
            })
            .collect::<Result<Vec<_>>>()?;
        let schema = Type::group_type_builder("records")
            .with_fields(fields)
            .build()?;
        let properties = WriterProperties::builder()
            .set_compression(Compression::SNAPPY)
            .build();
        let columns = columns
            .iter()
            .map(|column| Pending {
                values: match column.kind {
                    ColumnType::U64 => Values::U64(Vec::new()),
                    ColumnType::F64 => Values::F64(Vec::new()),
                    ColumnType::Text => Values::Text(Vec::new()),
                },
                present: Vec::new(),
            })
            .collect();
        Ok(Writer {
            file: SerializedFileWriter::new(sink, Arc::new(schema), Arc::new(properties))?,
            columns,
            rows: 0,
        })
    }

    pub(super) fn write(&mut self, row: &[Cell<'_>]) -> Result<()> {
        for (column, cell) in self.columns.iter_mut().zip(row) {
            column.present.push(i16::from(*cell != Cell::Absent));
            match (&mut column.values, cell) {
                (Values::U64(values), Cell::U64(n)) => values.push(n.cast_signed()),
                (Values::F64(values), Cell::F64(x)) => values.push(*x),
                (Values::Text(values), Cell::Text(text)) => values.push((*text).into()),
                _ => {} // absent: `RecordWriter::write` has checked the types
            }
        }
        self.rows += 1;
        if self.rows == GROUP_ROWS {
            self.write_group()?;
        }
        Ok(())
    }

    fn write_group(&mut self) -> Result<()> {
        let mut group = self.file.next_row_group()?;
        for column in &mut self.columns {
            match &mut column.values {
                Values::U64(values) => put::<Int64Type, W>(&mut group, values, &column.present)?,
                Values::F64(values) => put::<DoubleType, W>(&mut group, values, &column.present)?,
                Values::Text(values) => {
                    put::<ByteArrayType, W>(&mut group, values, &column.present)?;
                }
            }
            column.present.clear();
        }
        group.close()?;
        self.rows = 0;
        Ok(())
    }

    pub(super) fn finish(&mut self) -> Result<()> {
        if self.rows > 0 {
            self.write_group()?;
        }
        self.file.finish()?;
        self.file.inner_mut().flush()?;
        Ok(())
    }
}

fn put<T: DataType, W: Write + Send>(
    group: &mut SerializedRowGroupWriter<'_, W>,
    values: &mut Vec<T::T>,
    present: &[i16],
) -> Result<()> {
    let mut column = group
        .next_column()?
        .expect("the file has as many columns as its schema");
    column
        .typed::<T>()
        .write_batch(values, Some(present), None)?;
    values.clear();
    column.close()
}

/// Names of the columns, then the rows, one in memory at a time.
pub(crate) fn read<R: ChunkReader + 'static>(
    source: R,
) -> Result<(Vec<String>, impl Iterator<Item = Result<Vec<Value>>>)> {
    let file = SerializedFileReader::new(source)?;
    let schema = file.metadata().file_metadata().schema_descr();
    let names = schema
        .columns()
        .iter()
        .map(|column| column.name().to_owned())
        .collect();
    let rows = RowIter::from_file_into(Box::new(file)).map(|row| {
        Ok(row?
            .get_column_iter()
            .map(|(_, field)| value(field))
            .collect())
    });
    Ok((names, rows))
}

fn value(field: &Field) -> Value {
    let whole = |n: i64| u64::try_from(n).map_or(Value::F64(n as f64), Value::U64);
    match field {
        Field::Null => Value::Absent,
        Field::Byte(n) => whole((*n).into()),
        Field::Short(n) => whole((*n).into()),
        Field::Int(n) => whole((*n).into()),
        Field::Long(n) => whole(*n),
        Field::UByte(n) => Value::U64((*n).into()),
        Field::UShort(n) => Value::U64((*n).into()),
        Field::UInt(n) => Value::U64((*n).into()),
        Field::ULong(n) => Value::U64(*n),
        Field::Float(x) => Value::F64((*x).into()),
        Field::Double(x) => Value::F64(*x),
        Field::Str(text) => Value::Text(text.clone()),
        other => Value::Text(other.to_string()),
    }
}
