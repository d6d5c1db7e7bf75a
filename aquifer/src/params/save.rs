//! Writing a set to a safetensors file.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use aquifer_allocator::replace_file::replace_file;
use aquifer_device::RequestError;
use serde_json::{Map, Value, json};

use super::checkpoint::file_error;
use super::param_set::{METADATA, ParamSet};
use crate::error::Error;
use crate::tensor::{Place, Tensor};

impl ParamSet {
    /// Writes all tensors and the metadata to a safetensors file, in row-major order, and waits on
    /// the host for those on devices. One tensor after the other is brought to the host as a whole,
    /// broadcast ones with all their elements.
    ///
    /// Writes a temporary file in the same directory and renames it, so that there is never half a
    /// file. If `path` is a symbolic link, its target is replaced, and the link stays. A pipe, a
    /// device or another file that is not regular is written directly: a failure may leave a part
    /// there, and a pipe waits for a reader. The new file gets the permissions of the one that it
    /// replaces.
    ///
    /// # Errors
    /// [`TransferError::File`](aquifer_transfer::TransferError::File) where the file cannot be
    /// written or is a directory, [`RequestError::LengthOverflow`] where broadcast tensors are more
    /// bytes than a file can have, and as [`Tensor::to`].
    #[track_caller]
    pub fn save_blocking(&self, path: impl AsRef<Path>) -> Result<(), Error> {
        let _place = self.called_here();
        let path = path.as_ref();
        replace_file(path, |_, error| file_error(path, error), |file| self.write(path, file))
    }

    /// Errors name the file as the caller does.
    fn write(&self, path: &Path, file: &mut File) -> Result<(), Error> {
        let failed = |error| file_error(path, error);
        // Larger elements first, so that all are aligned, then by name: as the reference
        // implementation has it.
        let mut params: Vec<(&str, &Tensor)> = self.iter().collect();
        params.sort_by_key(|(name, tensor)| (Reverse(tensor.dtype().bytes()), *name));
        let header = header(&params, self.metadata())?;
        let mut file = BufWriter::new(file);
        file.write_all(&(header.len() as u64).to_le_bytes()).map_err(failed)?;
        file.write_all(&header).map_err(failed)?;
        for (_, tensor) in params {
            let host = tensor.to(Place::Host)?.wait()?.contiguous()?;
            file.write_all(host.host_bytes()?).map_err(failed)?;
        }
        file.flush().map_err(failed)
    }
}

/// The header in JSON, filled with spaces to a multiple of 8 bytes.
fn header(params: &[(&str, &Tensor)], metadata: &BTreeMap<String, String>) -> Result<Vec<u8>, Error> {
    let mut tensors = Map::new();
    if !metadata.is_empty() {
        tensors.insert(METADATA.to_owned(), json!(metadata));
    }
    let mut start = 0u64;
    for (name, tensor) in params {
        let (len, size) = (tensor.len() as u64, tensor.dtype().bytes());
        let end = len.checked_mul(size).and_then(|bytes| bytes.checked_add(start));
        let end = end.ok_or(RequestError::LengthOverflow { len, size })?;
        // The format has the dtypes' names in capitals.
        let dtype = tensor.dtype().name().to_ascii_uppercase();
        let entry = json!({ "dtype": dtype, "shape": tensor.shape(), "data_offsets": [start, end] });
        tensors.insert((*name).to_owned(), entry);
        start = end;
    }
    let mut header = Value::Object(tensors).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    Ok(header)
}

#[cfg(unix)]
#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::fs::{FileTypeExt, symlink};

    use super::super::tests::Directory;
    use aquifer_transfer::TransferError;

    use super::*;
    use crate::params::Checkpoint;

    fn set(value: f32) -> ParamSet {
        let mut set = ParamSet::new();
        set.insert("a", Tensor::from_vec(vec![value; 3], &[3]).unwrap()).unwrap();
        set
    }

    fn is_saved(path: &Path, value: f32) {
        let loaded = Checkpoint::open(path).unwrap().load_blocking(Place::Host, crate::params::Load::new()).unwrap();
        assert_eq!(loaded.get("a").unwrap().to_vec::<f32>().unwrap(), [value; 3]);
    }

    fn is_link(path: &Path) -> bool {
        std::fs::symlink_metadata(path).unwrap().is_symlink()
    }

    #[test]
    fn every_file_name_of_the_file_system_is_accepted() {
        let directory = Directory::new();
        for name in ["m".repeat(255), "\u{00fc}".repeat(127), "\u{6a21}".repeat(85)] {
            set(1.0).save_blocking(directory.0.join(&name)).unwrap();
            is_saved(&directory.0.join(&name), 1.0);
        }
        assert_eq!(std::fs::read_dir(&directory.0).unwrap().count(), 3, "nothing else is left there");
    }

    #[test]
    fn links_stay_and_their_targets_are_replaced() {
        let directory = Directory::new();
        let real = directory.file("real", b"old");
        let at = |name: &str| directory.0.join(name);
        std::fs::create_dir(at("below")).unwrap();
        symlink("real", at("relative")).unwrap();
        symlink("../relative", at("below/chain")).unwrap();
        symlink(&real, at("absolute")).unwrap();
        for (value, link) in (1u8..).zip(["relative", "below/chain", "absolute"]) {
            set(value.into()).save_blocking(at(link)).unwrap();
            assert!(is_link(&at(link)) && !is_link(&real), "{link}");
            is_saved(&real, value.into());
        }
        symlink("not-yet", at("dangling")).unwrap();
        set(9.0).save_blocking(at("dangling")).unwrap();
        assert!(is_link(&at("dangling")));
        is_saved(&at("not-yet"), 9.0);
        symlink("round", at("round")).unwrap();
        assert!(matches!(set(1.0).save_blocking(at("round")), Err(Error::Transfer(TransferError::File { .. }))));
        assert_eq!(std::fs::read_dir(&directory.0).unwrap().count(), 7, "nothing else is left there");
    }

    #[test]
    fn errors_name_the_file_as_the_caller_does() {
        let directory = Directory::new();
        let path = directory.0.join("nowhere/model");
        let error = set(1.0).save_blocking(&path).unwrap_err().to_string();
        assert!(error.starts_with(&format!("{}: ", path.display())), "{error}");
    }

    #[test]
    fn a_pipe_is_written_to_and_stays() {
        let directory = Directory::new();
        let path = directory.0.join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        let reader = std::thread::spawn({
            let path = path.clone();
            move || {
                let mut bytes = Vec::new();
                File::open(path).unwrap().read_to_end(&mut bytes).unwrap();
                bytes
            }
        });
        set(5.0).save_blocking(&path).unwrap();
        assert!(std::fs::symlink_metadata(&path).unwrap().file_type().is_fifo());
        is_saved(&directory.file("copy", &reader.join().unwrap()), 5.0);
        assert_eq!(std::fs::read_dir(&directory.0).unwrap().count(), 2);
    }

    #[test]
    fn a_directory_is_refused_and_stays_empty() {
        let directory = Directory::new();
        let error = set(1.0).save_blocking(&directory.0).unwrap_err();
        assert!(error.to_string().contains("directory"), "{error}");
        assert_eq!(std::fs::read_dir(&directory.0).unwrap().count(), 0);
    }

    #[test]
    fn file_names_that_are_not_unicode_are_kept() {
        use std::os::unix::ffi::OsStrExt;
        let directory = Directory::new();
        let path = directory.0.join(std::ffi::OsStr::from_bytes(b"m\xff.safetensors"));
        set(2.0).save_blocking(&path).unwrap();
        is_saved(&path, 2.0);
        assert_eq!(std::fs::read_dir(&directory.0).unwrap().count(), 1);
    }
}
