//! Files of tensors in the safetensors format, of which only the headers were read.
//!
//! A file is 8 bytes with the length of its header, little-endian, the header in JSON, and the
//! tensors one after the other (<https://github.com/huggingface/safetensors#format>). Large models
//! come as several files with an index `model.safetensors.index.json` that names the file of each
//! tensor. Everything in a file is checked.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use aquifer_kernels::DType;
use aquifer_transfer::TransferError;
use aquifer_transfer::internal::open_regular;
use safetensors::tensor::Metadata;
use serde::de::{Deserialize, Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};

use crate::error::Error;
use crate::layout::{Layout, MAX_DIMENSIONS};

/// The longest header of a file in bytes: that of the reference implementation.
const HEADER_MAX: u64 = 100_000_000;

/// Of files that are not as long as they were.
pub(super) const CHANGED: &str = "the file was changed after it was opened; open it again";

const INDEX: &str = "model.safetensors.index.json";

/// Tensors in one or several safetensors files. Opening reads headers alone;
/// [`Checkpoint::load_blocking`] brings the tensors, and [`Checkpoint::load_into_blocking`] writes
/// them to a set that exists.
///
/// ```
/// use aquifer::prelude::*;
/// use aquifer::tensor::{Checkpoint, Load, ParamSet};
/// let memory = Allocator::of(&aquifer::open("sim:24GiB")?)?;
/// let path = std::env::temp_dir().join(format!("aquifer-doc-{}.safetensors", std::process::id()));
///
/// let mut model = ParamSet::new();
/// model.insert("embed.weight", Tensor::from_vec(vec![1.0f32, 2.0], &[2])?)?;
/// model.save_blocking(&path)?;
///
/// let checkpoint = Checkpoint::open(&path)?;
/// assert_eq!(checkpoint.bytes(), 8);
/// let loaded = checkpoint.load_blocking(&memory, Load::new())?;
/// assert_eq!(loaded.get("embed.weight").unwrap().to_vec::<f32>()?, [1.0, 2.0]);
/// # std::fs::remove_file(&path)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Checkpoint {
    pub(super) shards: Vec<Shard>,
    pub(super) entries: Vec<TensorEntry>,
    metadata: BTreeMap<String, String>,
}

/// One file.
#[derive(Debug)]
pub(super) struct Shard {
    pub(super) path: PathBuf,
    pub(super) file: Arc<File>,
    pub(super) bytes: u64,
    /// The whole file, if it is mapped.
    pub(super) map: Option<Arc<memmap2::Mmap>>,
}

/// A tensor in a file.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct TensorEntry {
    /// Its name.
    pub name: String,
    /// The dtype's name in the file, such as `"BF16"`.
    pub file_dtype: String,
    /// Its dtype; `None` where it is one that tensors here do not have.
    pub dtype: Option<DType>,
    /// Its extents, outermost first.
    pub shape: Vec<usize>,
    /// Its bytes in the file.
    pub bytes: u64,
    /// The index of its file.
    pub(super) shard: usize,
    /// Its place in the file.
    pub(super) offset: u64,
    /// Bytes of an element of a dtype that is not known here; 0 where that is no whole number.
    pub(super) element_bytes: u64,
}

impl Checkpoint {
    /// Opens a safetensors file, an index of several, or a directory that has an index, or else
    /// such files.
    ///
    /// # Errors
    /// [`TransferError::File`] where a file cannot be read, [`Error::Checkpoint`] where it
    /// is invalid.
    pub fn open(path: impl AsRef<Path>) -> Result<Checkpoint, Error> {
        open(path.as_ref())
    }

    /// As [`Checkpoint::open`], mapping the files instead of reading them later. On the host
    /// tensors then share the mappings, which costs no memory before they are read; to a device
    /// this saves a copy where the system has the files in memory.
    ///
    /// # Errors
    /// As [`Checkpoint::open`].
    ///
    /// # Safety
    /// The files must not be changed or cut short, by any process, while the checkpoint or a tensor
    /// loaded from it to the host exists: tensors would change while they are read, and
    /// reading beyond the end of a file ends the process.
    #[allow(unsafe_code, reason = "only the caller knows the other writers of the files")]
    pub unsafe fn open_mapped(path: impl AsRef<Path>) -> Result<Checkpoint, Error> {
        let mut checkpoint = open(path.as_ref())?;
        for shard in &mut checkpoint.shards {
            // SAFETY: the caller promises that the file does not change while it is mapped.
            let map = unsafe { memmap2::Mmap::map(&*shard.file) }.map_err(|error| file_error(&shard.path, error))?;
            if map.len() as u64 != shard.bytes {
                return Err(fault(&shard.path, CHANGED));
            }
            shard.map = Some(Arc::new(map));
        }
        Ok(checkpoint)
    }

    /// The tensors, file by file in the order in which they lie there. Those without elements that
    /// lie in one place are in the order of the file's header.
    pub fn entries(&self) -> &[TensorEntry] {
        &self.entries
    }

    /// Texts about the tensors, by name ([`super::ParamSet::metadata`]). Where files differ in one,
    /// it is that of the first file.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Bytes of all tensors.
    pub fn bytes(&self) -> u64 {
        self.entries.iter().map(|entry| entry.bytes).sum()
    }

    /// Refuses files that are not as long as they were.
    pub(super) fn check_unchanged(&self) -> Result<(), Error> {
        for Shard { path, file, bytes, .. } in &self.shards {
            if file.metadata().map_err(|error| file_error(path, error))?.len() != *bytes {
                return Err(fault(path, CHANGED));
            }
        }
        Ok(())
    }

    /// The file that a tensor is in.
    pub(super) fn path_of(&self, entry: &TensorEntry) -> &Path {
        self.shards.get(entry.shard).map_or(Path::new(""), |shard| &shard.path)
    }
}

fn open(path: &Path) -> Result<Checkpoint, Error> {
    let metadata = std::fs::metadata(path).map_err(|error| file_error(path, error))?;
    if metadata.is_dir() {
        return open_directory(path);
    }
    if path.extension().is_some_and(|extension| extension == "json") {
        return open_index(path);
    }
    open_shards(vec![path.to_owned()])
}

fn open_directory(path: &Path) -> Result<Checkpoint, Error> {
    let index = path.join(INDEX);
    if index.is_file() {
        return open_index(&index);
    }
    let mut files = Vec::new();
    for entry in std::fs::read_dir(path).map_err(|error| file_error(path, error))? {
        let file = entry.map_err(|error| file_error(path, error))?.path();
        if file.extension().is_some_and(|extension| extension == "safetensors") {
            files.push(file);
        }
    }
    files.sort();
    if files.is_empty() { Err(fault(path, "the directory has no .safetensors file")) } else { open_shards(files) }
}

fn open_index(path: &Path) -> Result<Checkpoint, Error> {
    let (mut file, _) = open_regular(path).map_err(|error| file_error(path, error))?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).map_err(|error| file_error(path, error))?;
    let wrong = |problem: String| fault(path, format!("the index maps no tensors to files: {problem}"));
    let index: serde_json::Value = serde_json::from_slice(&bytes).map_err(|error| wrong(error.to_string()))?;
    let map = index.get("weight_map").and_then(serde_json::Value::as_object);
    let map = map.ok_or_else(|| wrong("it has no object \"weight_map\"".to_owned()))?;
    let mut file_of: BTreeMap<&str, &str> = BTreeMap::new();
    for (tensor, file) in map {
        let file = file.as_str().ok_or_else(|| wrong(format!("{tensor:?} is in no file")))?;
        // A plain name: an index must not lead out of its directory.
        let plain = Path::new(file).file_name().is_some_and(|name| name == file) && !file.contains(['/', '\\']);
        if !plain {
            return Err(fault(path, format!("the index names {file:?}, which is not a file in its directory")));
        }
        file_of.insert(tensor, file);
    }
    let files: BTreeSet<&str> = file_of.values().copied().collect();
    let directory = path.parent().unwrap_or(Path::new(""));
    let checkpoint = open_shards(files.into_iter().map(|file| directory.join(file)).collect())?;
    let present: HashMap<&str, &Path> =
        checkpoint.entries.iter().map(|entry| (entry.name.as_str(), checkpoint.path_of(entry))).collect();
    for (tensor, file) in file_of {
        if present.get(tensor).and_then(|path| path.file_name()).is_none_or(|name| name != file) {
            return Err(fault(path, format!("tensor {tensor:?} is not in {file}, where the index says")));
        }
    }
    Ok(checkpoint)
}

fn open_shards(paths: Vec<PathBuf>) -> Result<Checkpoint, Error> {
    let mut checkpoint =
        Checkpoint { shards: Vec::with_capacity(paths.len()), entries: Vec::new(), metadata: BTreeMap::new() };
    let mut shard_of: HashMap<String, usize> = HashMap::new();
    for (number, path) in paths.into_iter().enumerate() {
        let (shard, entries, metadata) = open_shard(path, number)?;
        for entry in &entries {
            if let Some(other) = shard_of.insert(entry.name.clone(), number) {
                let other = checkpoint.shards.get(other).unwrap_or(&shard).path.display();
                return Err(fault(&shard.path, format!("tensor {:?} is in {other}, too", entry.name)));
            }
        }
        checkpoint.shards.push(shard);
        checkpoint.entries.extend(entries);
        for (name, text) in metadata {
            checkpoint.metadata.entry(name).or_insert(text);
        }
    }
    Ok(checkpoint)
}

/// A file, its tensors, and the texts about them.
type Opened = (Shard, Vec<TensorEntry>, HashMap<String, String>);

fn open_shard(path: PathBuf, number: usize) -> Result<Opened, Error> {
    let (mut file, bytes) = open_regular(&path).map_err(|error| file_error(&path, error))?;
    let (metadata, places, start) = read_header(&mut file, &path, bytes)?;
    let needed = start.saturating_add(metadata.data_len() as u64);
    if needed != bytes {
        return Err(fault(&path, format!("header and tensors are {needed} bytes, the file is {bytes}")));
    }
    let mut entries = Vec::new();
    let mut names = metadata.offset_keys();
    // The order of tensors at one place is random there.
    names.sort_by_key(|name| (metadata.info(name).map(|info| info.data_offsets), places.get(name)));
    for name in names {
        let Some(info) = metadata.info(&name) else { continue };
        let shape = info.shape.clone();
        if Layout::row_major(&shape).is_err() {
            return Err(too_large(&path, &name, &shape));
        }
        if name.split('.').any(str::is_empty) {
            return Err(fault(&path, format!("tensor {name:?} has an empty part in its name")));
        }
        let bits = info.dtype.bitsize() as u64;
        let file_dtype = format!("{:?}", info.dtype);
        entries.push(TensorEntry {
            name,
            dtype: file_dtype.to_ascii_lowercase().parse().ok(),
            file_dtype,
            shape,
            bytes: (info.data_offsets.1 - info.data_offsets.0) as u64,
            shard: number,
            offset: start + info.data_offsets.0 as u64,
            element_bytes: if bits.is_multiple_of(8) { bits / 8 } else { 0 },
        });
    }
    // Collected anew: safetensors returns the map of `std` or that of hashbrown, depending on its
    // features.
    let texts = metadata.metadata().iter().flatten().map(|(key, text)| (key.clone(), text.clone())).collect();
    Ok((Shard { path, file: Arc::new(file), bytes, map: None }, entries, texts))
}

/// Reads a file's header. Returns it, the place of each name in it, and the place of the first
/// tensor.
fn read_header(file: &mut File, path: &Path, bytes: u64) -> Result<(Metadata, HashMap<String, usize>, u64), Error> {
    let truncated =
        |needed: u64| fault(path, format!("the file ends in its header: {bytes} bytes of at least {needed}"));
    if bytes < 8 {
        return Err(truncated(8));
    }
    let mut length = [0; 8];
    file.read_exact(&mut length).map_err(|error| read_error(path, error))?;
    let length = u64::from_le_bytes(length);
    if length > HEADER_MAX {
        return Err(fault(path, format!("a header of {length} bytes, more than the {HEADER_MAX} there may be")));
    }
    if bytes - 8 < length {
        return Err(truncated(8 + length));
    }
    let mut header = vec![0; usize::try_from(length).unwrap_or(usize::MAX)];
    file.read_exact(&mut header).map_err(|error| read_error(path, error))?;
    let problem = |error: serde_json::Error| fault(path, format!("the header describes no tensors: {error}"));
    let DistinctNames(places) = serde_json::from_slice(&header).map_err(problem)?;
    // Deserialising checks that tensors are as long as their shapes say and lie one after the
    // other.
    let metadata = serde_json::from_slice(&header).map_err(problem)?;
    Ok((metadata, places, 8 + length))
}

/// The places of the names in a map without duplicates, of which a parser would silently keep the
/// last one.
struct DistinctNames(HashMap<String, usize>);

impl<'de> Deserialize<'de> for DistinctNames {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Names;

        impl<'de> Visitor<'de> for Names {
            type Value = DistinctNames;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map from names to tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<DistinctNames, A::Error> {
                let mut places = HashMap::new();
                while let Some((name, IgnoredAny)) = map.next_entry()? {
                    let place = places.len();
                    match places.entry(name) {
                        Entry::Vacant(free) => free.insert(place),
                        Entry::Occupied(taken) => {
                            return Err(A::Error::custom(format_args!("{:?} is there twice", taken.key())));
                        }
                    };
                }
                Ok(DistinctNames(places))
            }
        }

        deserializer.deserialize_map(Names)
    }
}

pub(super) fn fault(path: &Path, problem: impl Into<String>) -> Error {
    Error::Checkpoint { path: path.display().to_string(), problem: problem.into() }
}

/// The error of a tensor that no layout describes.
pub(super) fn too_large(path: &Path, tensor: &str, shape: &[usize]) -> Error {
    let most = format!("more than {MAX_DIMENSIONS} dimensions or too many elements");
    fault(path, format!("tensor {tensor:?} of {shape:?} has {most}"))
}

/// An error of reading a range that existed when the file was opened.
pub(super) fn read_error(path: &Path, error: std::io::Error) -> Error {
    match error.kind() {
        ErrorKind::UnexpectedEof => fault(path, CHANGED),
        _ => file_error(path, error),
    }
}

pub(super) fn file_error(path: &Path, error: std::io::Error) -> Error {
    TransferError::File { path: path.display().to_string(), cause: Arc::new(error) }.into()
}
