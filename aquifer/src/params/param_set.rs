//! Named tensors of a model.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::panic::Location;

use aquifer_device::internal::CalledFrom;

use crate::error::Error;
use crate::tensor::{Place, Tensor};

/// A named tensor.
#[derive(Clone)]
pub(super) struct Param {
    /// Its name, with dots between the parts: `"encoder.0.weight"`.
    pub(super) name: String,
    pub(super) tensor: Tensor,
}

/// The named tensors of a model, in insertion order. Names are unique, with dots between their
/// parts: `"encoder.0.weight"`.
///
/// A set moves as a whole ([`ParamSet::move_blocking`]), and can be checked for tensors that were
/// in other places ([`ParamSet::check_all_on`]). Cloning shares the tensors' memory.
///
/// ```
/// use aquifer::prelude::*;
/// use aquifer::tensor::ParamSet;
/// let memory = Allocator::of(&aquifer::open("sim:24GiB")?)?;
///
/// let mut model = ParamSet::new();
/// model.insert("linear.weight", Tensor::from_vec(vec![1.0f32; 6], &[2, 3])?)?;
/// model.insert("linear.bias", Tensor::from_vec(vec![0.0f32; 2], &[2])?)?;
/// model.move_blocking(&memory)?; // all or none
/// assert!(model.check_all_on(&memory).is_ok());
///
/// model.insert("head.weight", Tensor::from_vec(vec![1.0f32; 2], &[2])?)?;
/// let error = model.check_all_on(&memory).unwrap_err().to_string();
/// assert!(error.contains("head.weight (8 bytes on cpu)"), "{error}");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Default)]
pub struct ParamSet {
    params: Vec<Param>,
    by_name: HashMap<String, usize>,
    metadata: BTreeMap<String, String>,
}

/// The entry of a safetensors file that is no tensor: texts about all of them.
pub(super) const METADATA: &str = "__metadata__";

impl ParamSet {
    /// An empty set.
    pub fn new() -> ParamSet {
        ParamSet::default()
    }

    /// Puts a tensor in.
    ///
    /// # Errors
    /// A name that is already in the set, is empty, has an empty part between its dots, or is
    /// `__metadata__`. The set is then unchanged.
    pub fn insert(&mut self, name: impl Into<String>, tensor: Tensor) -> Result<(), Error> {
        let name = name.into();
        if name.split('.').any(str::is_empty) {
            return Err(Error::ParamName { name, problem: "has an empty part" });
        }
        if name == METADATA {
            return Err(Error::ParamName { name, problem: "means something else in safetensors files" });
        }
        if self.by_name.contains_key(&name) {
            return Err(Error::ParamName { name, problem: "is there already" });
        }
        self.by_name.insert(name.clone(), self.params.len());
        self.params.push(Param { name, tensor });
        Ok(())
    }

    /// A tensor by name.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.by_name.get(name).and_then(|&at| self.params.get(at)).map(|param| &param.tensor)
    }

    /// Replaces a tensor and returns the old one. The new tensor may be of any dtype, shape and
    /// place.
    ///
    /// # Errors
    /// A name that is not there.
    pub fn replace(&mut self, name: &str, tensor: Tensor) -> Result<Tensor, Error> {
        let found = self.by_name.get(name).and_then(|&at| self.params.get_mut(at));
        let param = found.ok_or_else(|| Error::ParamName { name: name.to_owned(), problem: "is not there" })?;
        Ok(std::mem::replace(&mut param.tensor, tensor))
    }

    /// Takes a tensor out; the others stay in their order. `None` if there is none of the name.
    /// Parameters that are tied to it are not affected.
    pub fn remove(&mut self, name: &str) -> Option<Tensor> {
        let at = self.by_name.remove(name)?;
        self.by_name.values_mut().filter(|place| **place > at).for_each(|place| *place -= 1);
        Some(self.params.remove(at).tensor)
    }

    /// Names and tensors, in their order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Tensor)> {
        self.params.iter().map(|param| (param.name.as_str(), &param.tensor))
    }

    /// The number of them.
    pub fn len(&self) -> usize {
        self.params.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.params.is_empty()
    }

    /// Texts about the set, by name, which safetensors files store with the tensors: loaded, moved
    /// and saved with the set. Some libraries ask for one; PyTorch's say `"format": "pt"`.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// These texts, mutable.
    pub fn metadata_mut(&mut self) -> &mut BTreeMap<String, String> {
        &mut self.metadata
    }

    /// Bytes of all elements; [`u64::MAX`] if there are more, which is possible with broadcast
    /// tensors. Tied parameters, which share memory, are counted for each of their names, so the
    /// memory behind them may be less.
    pub fn bytes(&self) -> u64 {
        self.params.iter().fold(0, |bytes, param| bytes.saturating_add(param.tensor.bytes()))
    }

    /// As [`Transfer::called_here`](crate::transfer::Transfer::called_here), where one of the
    /// tensors is on a device.
    #[track_caller]
    pub(super) fn called_here(&self) -> Option<CalledFrom> {
        let at = Location::caller();
        self.params.iter().find_map(|param| param.tensor.place().device()?.called_from(at))
    }

    /// Bytes of all elements by place, counted as by [`ParamSet::bytes`], in the order of the first
    /// parameter of each.
    pub fn bytes_by_place(&self) -> Vec<(Place, u64)> {
        let mut places: Vec<(Place, u64)> = Vec::new();
        for param in &self.params {
            let place = param.tensor.place();
            let known = places.iter_mut().find(|(known, _)| known.is_same(&place));
            match known {
                Some((_, bytes)) => *bytes = bytes.saturating_add(param.tensor.bytes()),
                None => places.push((place, param.tensor.bytes())),
            }
        }
        places
    }

    /// The tensors that are not in the given place: name, bytes and place of each.
    pub fn strays(&self, place: impl Into<Place>) -> Vec<String> {
        let place = place.into();
        let elsewhere = self.iter().filter(|(_, tensor)| !tensor.place().serves_as(&place));
        elsewhere.map(|(name, tensor)| format!("{name} ({} bytes on {})", tensor.bytes(), tensor.place())).collect()
    }

    /// Checks that all tensors are in the given place.
    ///
    /// # Errors
    /// [`Error::LeftBehind`], which lists those that are not.
    pub fn check_all_on(&self, place: impl TryInto<Place, Error: Into<Error>>) -> Result<(), Error> {
        let place = Place::named(place)?;
        let strays = self.strays(&place);
        if strays.is_empty() {
            return Ok(());
        }
        Err(Error::LeftBehind { place: place.to_string(), strays })
    }

    /// A set of the same names with other tensors, one for each.
    pub(crate) fn with_tensors(&self, tensors: Vec<Tensor>) -> ParamSet {
        debug_assert_eq!(tensors.len(), self.params.len());
        let with = |(param, tensor): (&Param, Tensor)| Param { name: param.name.clone(), tensor };
        ParamSet {
            params: self.params.iter().zip(tensors).map(with).collect(),
            by_name: self.by_name.clone(),
            metadata: self.metadata.clone(),
        }
    }
}

/// Names and tensors, in their order.
impl<'a> IntoIterator for &'a ParamSet {
    type Item = (&'a str, &'a Tensor);
    type IntoIter = std::vec::IntoIter<Self::Item>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter().collect::<Vec<_>>().into_iter()
    }
}

impl fmt::Debug for ParamSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ParamSet").field("len", &self.len()).field("bytes", &self.bytes()).finish_non_exhaustive()
    }
}
