//! Loading files into a set that exists.
//!
//! All tensors are first loaded into new memory, arranged so that copying them to the set's memory
//! needs no further memory. So an error of a file, or of an allocation, changes nothing. The copies
//! within devices that follow need no memory. Elements on a device are written where they are, for
//! all that share them; host memory never changes, so that tensors there are replaced.

use std::collections::{HashMap, HashSet};

use aquifer_transfer::Direction;

use super::checkpoint::Checkpoint;
use super::load::{Load, Wanted};
use super::param_set::ParamSet;
use crate::error::Error;
use crate::tensor::{Place, Tensor, Tie};
use crate::transfer::Pending;

impl Checkpoint {
    /// Loads tensors into a set of the same names, and waits on the host until they are there:
    /// PyTorch's `load_state_dict`. Each keeps its place and shape, and its dtype: floats are
    /// converted to the set's, and integers. Those that [`Load::filter`] leaves out stay as they
    /// are, and so do the set's kinds and metadata; [`Load::dtype`] is for sets that are made.
    ///
    /// Tensors on a device are written in place, so that clones, views and graphs that use their
    /// memory see the new elements. Those on the host are replaced. Tied parameters stay tied; one
    /// of their names in the files is enough, and the last one in the set's order counts.
    ///
    /// All or nothing: before anything is written, all of it is there, which takes as much memory
    /// again on each device.
    ///
    /// ```
    /// use aquifer::prelude::*;
    /// use aquifer::tensor::{Checkpoint, Load, ParamSet};
    /// let device = aquifer::open("sim:24GiB")?;
    /// let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
    /// let path = std::env::temp_dir().join(format!("aquifer-into-{}.safetensors", std::process::id()));
    /// let mut saved = ParamSet::new();
    /// saved.insert("head.weight", Tensor::from_vec(vec![1.0f32, 2.0], &[2])?)?;
    /// saved.save_blocking(&path)?;
    ///
    /// let mut model = ParamSet::new();
    /// let weight = Tensor::zeros(&[2], DType::BF16, &memory)?;
    /// model.insert("head.weight", weight.clone())?;
    /// Checkpoint::open(&path)?.load_into_blocking(&mut model, Load::new())?;
    /// assert_eq!(weight.cast(DType::F32, &stream)?.to_vec::<f32>()?, [1.0, 2.0]);
    ///
    /// model.insert("head.bias", Tensor::zeros(&[2], DType::BF16, &memory)?)?;
    /// let error = Checkpoint::open(&path)?.load_into_blocking(&mut model, Load::new()).unwrap_err().to_string();
    /// assert!(error.contains("missing from the files: head.bias"), "{error}");
    /// # std::fs::remove_file(&path)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Mismatch`], which names all tensors that are missing on either side or
    /// differ; a tensor on a device that repeats elements; and as [`Checkpoint::load_blocking`].
    /// The set is then as it was, except where the driver refuses the copies within a device that
    /// come last: some tensors may have been written then, and all can be loaded again.
    #[track_caller]
    pub fn load_into_blocking(&self, set: &mut ParamSet, mut how: Load<'_>) -> Result<(), Error> {
        let _place = set.called_here();
        self.check_unchanged()?;
        let mut wanted = self.wanted_by(set, &how)?;
        check_writable(set, &wanted)?;
        let bytes_total = wanted.iter().map(|wanted| wanted.entry.bytes).sum();
        let (mut loaded, mut bytes_done) = (HashMap::new(), 0);
        for (place, _) in set.bytes_by_place() {
            let is_here = |name: &str| set.get(name).is_some_and(|tensor| tensor.place().is_same(&place));
            let here: Vec<_> = wanted.extract_if(.., |wanted| is_here(&wanted.entry.name)).collect();
            let part = self.load_wanted(&here, &place, &mut how, (bytes_done, bytes_total))?;
            bytes_done += here.iter().map(|wanted| wanted.entry.bytes).sum::<u64>();
            loaded.extend(part.iter().map(|(name, tensor)| (name.to_owned(), tensor.clone())));
        }
        set.arrange(&mut loaded)?;
        set.take_over(&loaded)
    }

    /// The tensors to load into a set, with the set's dtypes.
    fn wanted_by(&self, set: &ParamSet, how: &Load<'_>) -> Result<Vec<Wanted<'_>>, Error> {
        let (mut wanted, mut unexpected, mut different) = (Vec::new(), Vec::new(), Vec::new());
        for entry in self.chosen(how) {
            let Some(tensor) = set.get(&entry.name) else {
                unexpected.push(entry.name.clone());
                continue;
            };
            let found = self.want(entry, how)?;
            if found.layout.shape() == tensor.shape() && found.stored.is_float() == tensor.dtype().is_float() {
                wanted.push(Wanted { dtype: tensor.dtype(), ..found });
            } else {
                different.push(format!(
                    "{} ({} {:?} in the files, {} {:?} on {} in the set)",
                    entry.name,
                    entry.file_dtype,
                    entry.shape,
                    tensor.dtype(),
                    tensor.shape(),
                    tensor.place()
                ));
            }
        }
        let names: HashSet<&str> = self.entries().iter().map(|entry| entry.name.as_str()).collect();
        let in_files = set.iter().filter(|(name, _)| names.contains(name));
        let ties: HashSet<Tie> = in_files.map(|(_, tensor)| tensor.tie()).collect();
        let missing = set.iter().filter(|(_, tensor)| !ties.contains(&tensor.tie()));
        let missing: Vec<String> = missing.map(|(name, _)| name.to_owned()).collect();
        if missing.is_empty() && unexpected.is_empty() && different.is_empty() {
            return Ok(wanted);
        }
        Err(Error::Mismatch { missing, unexpected, different })
    }
}

/// Checks, before loading, that the tensors can be written.
fn check_writable(set: &ParamSet, wanted: &[Wanted<'_>]) -> Result<(), Error> {
    let tensors = wanted.iter().filter_map(|wanted| set.get(&wanted.entry.name));
    tensors.filter(|tensor| !tensor.place().is_host()).try_for_each(Tensor::check_assignable)
}

impl ParamSet {
    /// Arranges loaded tensors so that writing them to the set's needs no memory.
    fn arrange(&self, loaded: &mut HashMap<String, Tensor>) -> Result<(), Error> {
        for (name, tensor) in self.iter() {
            if let (Some(new), Place::Device(transfer)) = (loaded.get_mut(name), tensor.place()) {
                *new = new.arranged_for(tensor, transfer.next_stream(Direction::OnDevice))?;
            }
        }
        Ok(())
    }

    /// Writes loaded tensors to the set's on devices, and replaces those on the host.
    fn take_over(&mut self, loaded: &HashMap<String, Tensor>) -> Result<(), Error> {
        let (mut copies, mut replaced) = (Vec::new(), HashMap::new());
        for (name, tensor) in self.iter() {
            let Some(new) = loaded.get(name) else { continue };
            match tensor.place() {
                Place::Device(transfer) => {
                    let stream = transfer.next_stream(Direction::OnDevice);
                    copies.push(tensor.clone().copy_from(new, stream)?);
                }
                Place::Host | Place::Pinned(_) => {
                    replaced.insert(tensor.tie(), new.clone());
                }
            }
        }
        Pending::all(copies).wait()?;
        let tensors = self.iter().map(|(_, tensor)| replaced.get(&tensor.tie()).unwrap_or(tensor).clone());
        *self = self.with_tensors(tensors.collect());
        Ok(())
    }
}
