//! Columns of a result as an Arrow table.
//!
//! The columns are moved into Arrow's buffers, and consumers of the stream share these: no value is copied.

use std::ffi::CStr;
use std::sync::Arc;

use arrow_array::builder::BooleanBufferBuilder;
use arrow_array::ffi_stream::FFI_ArrowArrayStream;
use arrow_array::types::{Float64Type, UInt32Type, UInt64Type};
use arrow_array::{
    Array, ArrayRef, LargeStringArray, PrimitiveArray, RecordBatch, RecordBatchIterator,
};
use arrow_buffer::{BooleanBuffer, Buffer, NullBuffer, OffsetBuffer, ScalarBuffer};
use arrow_schema::ffi::FFI_ArrowSchema;
use arrow_schema::{ArrowError, DataType, Field, Schema};
use pyo3::exceptions::{PyKeyError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyCapsule, PyList, PyTuple};
use slipstream_study::columns::{Column, Values};

const STREAM: &CStr = c"arrow_array_stream";
const SCHEMA: &CStr = c"arrow_schema";

fn wrong(error: ArrowError) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// Moves a column into Arrow's memory.
fn array(column: Column) -> Result<ArrayRef, ArrowError> {
    let rows = column.rows();
    let nulls = column
        .present
        .map(|bits| NullBuffer::new(BooleanBuffer::new(Buffer::from_vec(bits), 0, rows)));
    Ok(match column.values {
        Values::U32(values) => {
            Arc::new(PrimitiveArray::<UInt32Type>::try_new(values.into(), nulls)?)
        }
        Values::U64(values) => {
            Arc::new(PrimitiveArray::<UInt64Type>::try_new(values.into(), nulls)?)
        }
        Values::F64(values) => Arc::new(PrimitiveArray::<Float64Type>::try_new(
            values.into(),
            nulls,
        )?),
        Values::Text(ends, bytes) => Arc::new(LargeStringArray::try_new(
            OffsetBuffer::new(ScalarBuffer::from(ends)),
            Buffer::from_vec(bytes),
            nulls,
        )?),
    })
}

/// A column's name, kind, buffers, and bits of the rows that exist.
type PickledColumn = (String, String, Vec<Vec<u8>>, Option<Vec<u8>>);

/// A result in columns. `__arrow_c_stream__` passes it to polars, pyarrow, pandas and others without a copy.
#[pyclass(module = "slipstream._native", frozen)]
pub(crate) struct Table {
    batch: RecordBatch,
}

impl Table {
    pub(crate) fn new(columns: Vec<Column>) -> PyResult<Table> {
        let names: Vec<String> = columns.iter().map(|column| column.name.clone()).collect();
        let arrays = columns.into_iter().map(array);
        let arrays: Vec<ArrayRef> = arrays.collect::<Result<_, _>>().map_err(wrong)?;
        Table::of(names, arrays)
    }

    fn of(names: Vec<String>, arrays: Vec<ArrayRef>) -> PyResult<Table> {
        let fields: Vec<Field> = names
            .into_iter()
            .zip(&arrays)
            .map(|(name, array)| Field::new(name, array.data_type().clone(), true))
            .collect();
        let batch = RecordBatch::try_new(Arc::new(Schema::new(fields)), arrays).map_err(wrong)?;
        Ok(Table { batch })
    }

    /// A column as Python objects.
    fn objects<'py>(&self, py: Python<'py>, at: usize) -> PyResult<Bound<'py, PyList>> {
        let array = self.batch.column(at);
        let any = array.as_any();
        let rows = 0..array.len();
        let value = |row: usize| array.is_valid(row).then_some(row);
        if let Some(of) = any.downcast_ref::<PrimitiveArray<UInt32Type>>() {
            return PyList::new(py, rows.map(|row| value(row).map(|row| of.value(row))));
        }
        if let Some(of) = any.downcast_ref::<PrimitiveArray<UInt64Type>>() {
            return PyList::new(py, rows.map(|row| value(row).map(|row| of.value(row))));
        }
        if let Some(of) = any.downcast_ref::<PrimitiveArray<Float64Type>>() {
            return PyList::new(py, rows.map(|row| value(row).map(|row| of.value(row))));
        }
        let of = any.downcast_ref::<LargeStringArray>();
        let of = of.ok_or_else(|| PyValueError::new_err("a column of an unknown type"))?;
        PyList::new(py, rows.map(|row| value(row).map(|row| of.value(row))))
    }
}

#[pymethods]
impl Table {
    /// Number of rows.
    #[getter]
    fn num_rows(&self) -> usize {
        self.batch.num_rows()
    }

    /// Names of the columns, in order.
    #[getter]
    fn column_names(&self) -> Vec<String> {
        let schema = self.batch.schema();
        schema.fields().iter().map(|f| f.name().clone()).collect()
    }

    /// Bytes that the columns take.
    #[getter]
    fn nbytes(&self) -> usize {
        self.batch.get_array_memory_size()
    }

    fn __len__(&self) -> usize {
        self.batch.num_rows()
    }

    /// The column of this name as a list.
    fn column<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyList>> {
        let at = self.batch.schema().index_of(name).map_err(|_| {
            PyKeyError::new_err(format!(
                "no column `{name}`; one of {}",
                self.column_names().join(", ")
            ))
        })?;
        self.objects(py, at)
    }

    /// Arrow's C stream of the table, in one batch. A schema that is asked for is not converted to, which the
    /// interface allows.
    #[pyo3(signature = (requested_schema=None))]
    fn __arrow_c_stream__<'py>(
        &self,
        py: Python<'py>,
        requested_schema: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        let _ = requested_schema;
        let batches = [Ok(self.batch.clone())];
        let reader = RecordBatchIterator::new(batches, self.batch.schema());
        PyCapsule::new_with_value(py, FFI_ArrowArrayStream::new(Box::new(reader)), STREAM)
    }

    /// Arrow's C schema of the table.
    fn __arrow_c_schema__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyCapsule>> {
        let schema = FFI_ArrowSchema::try_from(&*self.batch.schema()).map_err(wrong)?;
        PyCapsule::new_with_value(py, schema, SCHEMA)
    }

    fn __reduce__<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
        let mut columns = Vec::new();
        for (field, array) in self
            .batch
            .schema()
            .fields()
            .iter()
            .zip(self.batch.columns())
        {
            let data = array.to_data();
            // Of a whole array: its buffers begin at its first row.
            let buffers: Vec<_> = data
                .buffers()
                .iter()
                .map(|buffer| PyBytes::new(py, buffer.as_slice()))
                .collect();
            let nulls = data.nulls().map(|nulls| {
                let mut bits = BooleanBufferBuilder::new(nulls.len());
                bits.append_buffer(nulls.inner());
                PyBytes::new(py, bits.finish().values())
            });
            let kind = match data.data_type() {
                DataType::UInt32 => "u32",
                DataType::UInt64 => "u64",
                DataType::Float64 => "f64",
                _ => "text",
            };
            columns.push((field.name().clone(), kind, buffers, nulls));
        }
        let new = py
            .import("slipstream._native")?
            .getattr("Table")?
            .getattr("_of_buffers")?;
        let args = (self.batch.num_rows(), columns).into_pyobject(py)?;
        Ok((new, args))
    }

    /// The table of a pickle.
    #[staticmethod]
    fn _of_buffers(rows: usize, columns: Vec<PickledColumn>) -> PyResult<Table> {
        let broken = || PyValueError::new_err("the pickle of a table is broken");
        let mut names = Vec::new();
        let mut arrays: Vec<ArrayRef> = Vec::new();
        for (name, kind, buffers, nulls) in columns {
            let nulls = match nulls {
                Some(bits) if bits.len() >= rows.div_ceil(8) => Some(NullBuffer::new(
                    BooleanBuffer::new(Buffer::from_vec(bits), 0, rows),
                )),
                Some(_) => return Err(broken()),
                None => None,
            };
            let wide = if kind == "u32" { 4 } else { 8 };
            let mut buffers = buffers.into_iter();
            let first = buffers.next().ok_or_else(broken)?;
            let count = rows + usize::from(kind == "text");
            if first.len() < count * wide {
                return Err(broken());
            }
            // Copied once more into memory of the alignment that Arrow asks for.
            let aligned = Buffer::from_slice_ref(&first[..count * wide]);
            arrays.push(match kind.as_str() {
                "u32" => Arc::new(
                    PrimitiveArray::<UInt32Type>::try_new(ScalarBuffer::from(aligned), nulls)
                        .map_err(wrong)?,
                ),
                "u64" => Arc::new(
                    PrimitiveArray::<UInt64Type>::try_new(ScalarBuffer::from(aligned), nulls)
                        .map_err(wrong)?,
                ),
                "f64" => Arc::new(
                    PrimitiveArray::<Float64Type>::try_new(ScalarBuffer::from(aligned), nulls)
                        .map_err(wrong)?,
                ),
                "text" => {
                    let ends = ScalarBuffer::<i64>::from(aligned);
                    if ends.first() != Some(&0) || ends.windows(2).any(|pair| pair[0] > pair[1]) {
                        return Err(broken());
                    }
                    let bytes = buffers.next().ok_or_else(broken)?;
                    Arc::new(
                        LargeStringArray::try_new(
                            OffsetBuffer::new(ends),
                            Buffer::from_vec(bytes),
                            nulls,
                        )
                        .map_err(wrong)?,
                    )
                }
                _ => return Err(broken()),
            });
            names.push(name);
        }
        Table::of(names, arrays)
    }
}
