//! Bringing the tensors of files to a place.
//!
//! To a device, large tensors go through the staging ring, whose threads read and convert ahead of
//! the copy engine; small ones are read by the caller and sent together. A few tensors are in
//! flight at a time, in addition to the next batch of small ones, so that host memory and memory
//! for conversions are bounded. After a failure no loaded tensor stays.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use aquifer_kernels::DType;
use aquifer_transfer::internal::{FileSource, len_of};
use aquifer_transfer::{Direction, HostSource, Owned};

use super::checkpoint::{CHANGED, Checkpoint, TensorEntry, fault, read_error, too_large};
use super::outgoing::{Outgoing, SMALL_TENSOR_BYTES};
use super::param_set::ParamSet;
use super::relocate::{Progress, ProgressCallback};
use crate::allocator::Allocator;
use crate::error::Error;
use crate::layout::Layout;
use crate::tensor::{Converted, Memory, Place, Tensor, smaller};
use crate::transfer::{Pending, Transfer};

/// The most tensors in flight, in addition to the last one, and without small ones that are not
/// sent yet.
const IN_FLIGHT: usize = 8;

/// Selects the tensors to load.
type Filter<'a> = Box<dyn Fn(&TensorEntry) -> bool + 'a>;

/// Options of loading files.
#[derive(Default)]
#[must_use = "nothing is loaded before it is given to `Checkpoint::load_blocking` or `Checkpoint::load_into_blocking`"]
pub struct Load<'a> {
    filter: Option<Filter<'a>>,
    dtype: Option<DType>,
    others_as_bytes: bool,
    progress: Option<ProgressCallback<'a>>,
}

impl<'a> Load<'a> {
    /// All tensors, as they are.
    pub fn new() -> Load<'a> {
        Load::default()
    }

    /// Only those for which `keep` returns true. The others are not read.
    pub fn filter(self, keep: impl Fn(&TensorEntry) -> bool + 'a) -> Load<'a> {
        Load { filter: Some(Box::new(keep)), ..self }
    }

    /// Converts tensors of floats to another dtype of floats, or those of integers to one of
    /// integers. Others stay as they are. No effect where a set has dtypes already
    /// ([`Checkpoint::load_into_blocking`]).
    pub fn dtype(self, dtype: DType) -> Load<'a> {
        Load { dtype: Some(dtype), ..self }
    }

    /// Loads tensors of unknown dtypes, such as `BOOL`, `I8` or `F8_E4M3`, as [`DType::U8`], bit by
    /// bit: with the same shape where an element is a byte, else with another dimension for the
    /// bytes of an element. Without this, and for elements of less than a byte, they are an error.
    pub fn others_as_bytes(self) -> Load<'a> {
        Load { others_as_bytes: true, ..self }
    }

    /// Calls back for every complete tensor.
    pub fn progress(self, report: impl FnMut(&Progress<'_>) + 'a) -> Load<'a> {
        Load { progress: Some(Box::new(report)), ..self }
    }
}

impl fmt::Debug for Load<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Load")
            .field("dtype", &self.dtype)
            .field("others_as_bytes", &self.others_as_bytes)
            .finish_non_exhaustive()
    }
}

/// A tensor to load.
pub(super) struct Wanted<'a> {
    pub(super) entry: &'a TensorEntry,
    /// The dtype of the bytes in the file.
    pub(super) stored: DType,
    pub(super) dtype: DType,
    pub(super) layout: Layout,
}

impl Checkpoint {
    /// Loads tensors to a place, and waits on the host until they are there, as a set in the order
    /// of the files. All or nothing.
    ///
    /// # Errors
    /// Tensors of dtypes that are not known here, files that cannot be read, or whose length
    /// changed since they were opened, when memory runs out, and errors of the driver.
    #[track_caller]
    pub fn load_blocking(
        &self,
        place: impl TryInto<Place, Error: Into<Error>>,
        mut how: Load<'_>,
    ) -> Result<ParamSet, Error> {
        let place = Place::named(place)?;
        let _place = place.called_here();
        self.check_unchanged()?;
        let wanted = self.chosen(&how).map(|entry| self.want(entry, &how)).collect::<Result<Vec<_>, _>>()?;
        let bytes_total = wanted.iter().map(|wanted| wanted.entry.bytes).sum();
        let mut set = self.load_wanted(&wanted, &place, &mut how, (0, bytes_total))?;
        set.metadata_mut().clone_from(self.metadata());
        Ok(set)
    }

    /// Loads some tensors to a place. All or nothing. Progress reports start at `bytes_done` of
    /// `bytes_total`.
    pub(super) fn load_wanted(
        &self,
        wanted: &[Wanted<'_>],
        place: &Place,
        how: &mut Load<'_>,
        (bytes_done, bytes_total): (u64, u64),
    ) -> Result<ParamSet, Error> {
        let mut outgoing = Outgoing::default();
        let loaded = self.load_all(wanted, place, &mut outgoing, how, (bytes_done, bytes_total));
        if loaded.is_err() {
            outgoing.abandon();
        }
        loaded
    }

    fn load_all(
        &self,
        wanted: &[Wanted<'_>],
        place: &Place,
        outgoing: &mut Outgoing,
        how: &mut Load<'_>,
        (mut bytes_done, bytes_total): (u64, u64),
    ) -> Result<ParamSet, Error> {
        let mut set = ParamSet::new();
        let mut entries = wanted.iter().map(|wanted| wanted.entry);
        // Waits for the oldest tensor, and puts it into the set. Returns whether there was one.
        let mut finish_oldest = |outgoing: &mut Outgoing| -> Result<bool, Error> {
            let (Some(tensor), Some(entry)) = (outgoing.wait_oldest()?, entries.next()) else { return Ok(false) };
            set.insert(entry.name.clone(), tensor)?;
            bytes_done += entry.bytes;
            if let Some(report) = &mut how.progress {
                report(&Progress { name: &entry.name, bytes_done, bytes_total });
            }
            Ok(true)
        };
        for wanted in wanted {
            match place {
                Place::Device(transfer) => self.begin(wanted, transfer, outgoing)?,
                _ => outgoing.push(Pending::ready(self.load_to_host(wanted, place)?)),
            }
            while outgoing.in_flight() > IN_FLIGHT && finish_oldest(outgoing)? {}
        }
        while finish_oldest(outgoing)? {}
        Ok(set)
    }

    /// The tensors that are to be loaded.
    pub(super) fn chosen<'a>(&'a self, how: &Load<'_>) -> impl Iterator<Item = &'a TensorEntry> {
        self.entries.iter().filter(|entry| how.filter.as_ref().is_none_or(|keep| keep(entry)))
    }

    /// The plan of loading one tensor, checked before any is loaded.
    pub(super) fn want<'a>(&'a self, entry: &'a TensorEntry, how: &Load<'_>) -> Result<Wanted<'a>, Error> {
        let (stored, dtype, shape) = match (entry.dtype, how.others_as_bytes) {
            (Some(stored), _) => {
                let dtype = how.dtype.filter(|dtype| dtype.is_float() == stored.is_float()).unwrap_or(stored);
                (stored, dtype, entry.shape.clone())
            }
            (None, true) if entry.element_bytes > 0 => {
                let bytes = usize::try_from(entry.element_bytes).ok().filter(|&bytes| bytes > 1);
                (DType::U8, DType::U8, entry.shape.iter().copied().chain(bytes).collect())
            }
            (None, _) => {
                let TensorEntry { name, file_dtype, element_bytes, .. } = entry;
                let instead =
                    if *element_bytes > 0 { " or load it as bytes" } else { ": its elements are less than a byte" };
                let problem = "which tensors here do not have; leave it out";
                let text = format!("tensor {name:?} is of dtype {file_dtype}, {problem}{instead}");
                return Err(fault(self.path_of(entry), text));
            }
        };
        let layout = Layout::row_major(&shape).map_err(|_| too_large(self.path_of(entry), &entry.name, &shape))?;
        Ok(Wanted { entry, stored, dtype, layout })
    }

    /// Begins bringing a tensor to a device.
    fn begin(&self, wanted: &Wanted<'_>, transfer: &Transfer, outgoing: &mut Outgoing) -> Result<(), Error> {
        let (stored, dtype, layout) = (wanted.stored, wanted.dtype, wanted.layout);
        let largest = wanted.entry.bytes.max((layout.len() as u64).saturating_mul(dtype.bytes()));
        if largest <= SMALL_TENSOR_BYTES {
            let source = self.source(wanted.entry, stored, dtype)?;
            let mut elements = vec![0; usize::try_from(source.bytes()).unwrap_or(usize::MAX)];
            source.read(0, &mut elements)?;
            return outgoing.push_small(transfer, None, &elements, (dtype, layout));
        }
        let crossing = smaller(stored, dtype);
        let source = self.source(wanted.entry, stored, crossing)?;
        let transfer = transfer.clone();
        let stream = transfer.next_stream(Direction::Upload).clone();
        let mut buffer = transfer.allocator().alloc::<u8>(len_of(source.bytes(), 1)?, &stream)?;
        let uploaded = transfer.on(&stream)?.upload_from(source, &mut buffer)?;
        outgoing.push(uploaded.and_then(move |()| {
            let tensor = Tensor::on_device(buffer, &transfer, crossing, layout)?;
            // A cast is enqueued, and the tensor carries its ticks.
            tensor.convey(&(&transfer).into(), dtype, Some(&stream))?.enqueued_for(&stream)
        }));
        Ok(())
    }

    fn load_to_host(&self, wanted: &Wanted<'_>, place: &Place) -> Result<Tensor, Error> {
        let (entry, dtype) = (wanted.entry, wanted.dtype);
        let memory = match (place.pool(), self.shared(wanted)) {
            (None, Some(shared)) => Memory::Host(shared),
            (pool, _) => {
                let source = self.source(entry, wanted.stored, dtype)?;
                Memory::on_host(pool, dtype, wanted.layout.len(), |to| Ok(source.read(0, to)?))?
            }
        };
        Tensor::new(memory, dtype, wanted.layout)
    }

    /// The mapping's own memory, if the file is mapped and the tensor is aligned there.
    fn shared(&self, wanted: &Wanted<'_>) -> Option<Owned> {
        let map = self.shards.get(wanted.entry.shard)?.map.as_ref()?;
        let range = wanted.entry.range()?;
        let address = map.get(range.clone())?.as_ptr().addr() as u64;
        let usable = wanted.stored == wanted.dtype && address.is_multiple_of(wanted.dtype.bytes());
        usable.then(|| Owned::new::<u8, _>(Mapped { map: map.clone(), range }))
    }

    /// The elements of a tensor, converted as they are read.
    fn source(&self, entry: &TensorEntry, stored: DType, dtype: DType) -> Result<Arc<dyn HostSource>, Error> {
        let changed = || fault(self.path_of(entry), CHANGED);
        let shard = self.shards.get(entry.shard).ok_or_else(changed)?;
        match (&shard.map, entry.range()) {
            (Some(map), Some(range)) => {
                let mapped = Owned::new::<u8, _>(Mapped { map: map.clone(), range });
                Ok(converted(mapped, stored, dtype))
            }
            _ => {
                let path = shard.path.clone();
                let failed = move |error| read_error(&path, error).into();
                Ok(converted(FileSource::new(shard.file.clone(), entry.offset, entry.bytes, failed), stored, dtype))
            }
        }
    }
}

fn converted(source: impl HostSource + 'static, from: DType, to: DType) -> Arc<dyn HostSource> {
    if from == to { Arc::new(source) } else { Arc::new(Converted::new(source, from, to)) }
}

impl TensorEntry {
    /// Its range in a mapping of its file.
    fn range(&self) -> Option<std::ops::Range<usize>> {
        let start = usize::try_from(self.offset).ok()?;
        Some(start..start.checked_add(usize::try_from(self.bytes).ok()?)?)
    }
}

/// A part of a mapped file.
struct Mapped {
    map: Arc<memmap2::Mmap>,
    range: std::ops::Range<usize>,
}

impl AsRef<[u8]> for Mapped {
    fn as_ref(&self) -> &[u8] {
        self.map.get(self.range.clone()).unwrap_or_default()
    }
}

impl Allocator {
    /// The tensors of a safetensors file, in this allocator's memory. Waits until they are there.
    /// [`Checkpoint`] loads a part, converts, and reports progress.
    ///
    /// # Errors
    /// As [`Checkpoint::open`] and [`Checkpoint::load_blocking`].
    pub fn load_safetensors(&self, path: impl AsRef<Path>) -> Result<ParamSet, Error> {
        Checkpoint::open(path)?.load_blocking(&self.transfer()?, Load::new())
    }
}
