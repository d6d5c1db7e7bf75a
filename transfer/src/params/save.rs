//! Writing a set to a safetensors file.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use aquifer_kernels::DType;
use serde_json::{Map, Value, json};

use super::checkpoint::file_error;
use super::param_set::{Param, ParamSet};
use crate::error::TransferError;
use crate::tensor::{Place, Tensor};

impl ParamSet {
    /// Writes all tensors to a safetensors file, in row-major order, and waits on the host for those on devices. The file is written beside `path` and then takes its
    /// place, so that there is never half of one.
    ///
    /// # Errors
    /// [`TransferError::File`] where the file cannot be written, and as [`Tensor::to`].
    pub fn save_blocking(&self, path: impl AsRef<Path>) -> Result<(), TransferError> {
        let path = path.as_ref();
        let part = PathBuf::from(format!("{}.part-{}", path.display(), std::process::id()));
        let written =
            self.write(&part).and_then(|()| std::fs::rename(&part, path).map_err(|error| file_error(path, error)));
        if written.is_err() {
            // Nothing can be done where it cannot be removed, and the first error is the one to tell.
            let _ = std::fs::remove_file(&part);
        }
        written
    }

    fn write(&self, path: &Path) -> Result<(), TransferError> {
        let failed = |error| file_error(path, error);
        // Larger elements first, so that all are aligned, then by name: as the reference implementation has it.
        let mut params: Vec<&Param> = self.iter().collect();
        params
            .sort_by(|a, b| b.tensor.dtype().bytes().cmp(&a.tensor.dtype().bytes()).then_with(|| a.name.cmp(&b.name)));
        let header = header(&params)?;
        let mut file = BufWriter::new(File::create(path).map_err(failed)?);
        file.write_all(&(header.len() as u64).to_le_bytes()).map_err(failed)?;
        file.write_all(&header).map_err(failed)?;
        for param in params {
            let host = param.tensor.to(Place::Host)?.wait()?.contiguous()?;
            file.write_all(host.host_bytes()?).map_err(failed)?;
        }
        let file = file.into_inner().map_err(|error| failed(error.into_error()))?;
        file.sync_all().map_err(failed)
    }
}

/// The header in JSON, filled with spaces to a multiple of 8 bytes.
fn header(params: &[&Param]) -> Result<Vec<u8>, TransferError> {
    let mut tensors = Map::new();
    let mut start = 0u64;
    for param in params {
        let tensor: &Tensor = &param.tensor;
        let end = start + tensor.bytes();
        let entry = json!({
            "dtype": file_dtype(tensor.dtype())?, "shape": tensor.shape(), "data_offsets": [start, end],
        });
        tensors.insert(param.name.clone(), entry);
        start = end;
    }
    let mut header = Value::Object(tensors).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    Ok(header)
}

fn file_dtype(dtype: DType) -> Result<&'static str, TransferError> {
    Ok(match dtype {
        DType::U8 => "U8",
        DType::I32 => "I32",
        DType::U32 => "U32",
        DType::I64 => "I64",
        DType::U64 => "U64",
        DType::F16 => "F16",
        DType::BF16 => "BF16",
        DType::F32 => "F32",
        DType::F64 => "F64",
        other => return Err(TransferError::NoDType { name: other.name().to_owned() }),
    })
}
