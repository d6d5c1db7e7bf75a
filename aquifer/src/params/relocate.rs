//! Moving a set: all of it or nothing.
//!
//! New tensors replace the old ones when every copy is complete. So a failure changes nothing, and
//! drops the new tensors. Small tensors go to a device in batches.

use std::collections::HashMap;

use aquifer_device::Stream;
use aquifer_kernels::DType;

use super::outgoing::{Outgoing, SMALL_TENSOR_BYTES};
use super::param_set::ParamSet;
use crate::error::Error;
use crate::tensor::{Place, Tensor, Tie, To};
use crate::transfer::{OnStreams, Pending};

/// The progress of moving or loading tensors, reported for each complete tensor.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Progress<'a> {
    /// Name of the tensor that is complete.
    pub name: &'a str,
    /// Bytes of all tensors that are complete, as they were before conversion.
    pub bytes_done: u64,
    /// Bytes of all tensors.
    pub bytes_total: u64,
}

/// A callback for progress.
pub(super) type ProgressCallback<'a> = Box<dyn FnMut(&Progress<'_>) + 'a>;

impl OnStreams for ParamSet {
    fn ready_on(&self, stream: &Stream) -> Result<(), Error> {
        self.iter().try_for_each(|(_, tensor)| tensor.ready_on(stream))
    }
}

impl ParamSet {
    /// The set in another place. This one stays where it is until it is dropped or replaced. Tied
    /// parameters, which are the same part of the same memory, stay tied; tensors that are in the
    /// place already are shared.
    ///
    /// # Errors
    /// As [`Tensor::to`]. What was made until then is given back.
    #[track_caller]
    pub fn to(&self, place: impl TryInto<Place, Error: Into<Error>>) -> Result<Pending<ParamSet>, Error> {
        let place = Place::named(place)?;
        // Dropped in reverse order, as they nest.
        let _from = self.called_here();
        let _to = place.called_here();
        let Moving { outgoing, which, .. } = self.begin(&place, &To::new())?;
        let set = self.clone();
        Ok(Pending::all(outgoing.into_pendings())
            .map(move |moved| set.with_tensors(which.into_iter().map(|at| moved[at].clone()).collect())))
    }

    /// Moves the set to another place, and waits on the host until it is there. All or nothing:
    /// where something fails, every tensor is where it was.
    ///
    /// # Errors
    /// As [`Tensor::to`].
    #[track_caller]
    pub fn move_blocking(&mut self, place: impl TryInto<Place, Error: Into<Error>>) -> Result<(), Error> {
        self.move_with_blocking(place, To::new(), |_| {})
    }

    /// Moves the set as `how` says, and calls `progress` for every complete tensor, in their order;
    /// see [`ParamSet::move_blocking`].
    ///
    /// A dtype of floats converts tensors of floats, one of integers those of integers. Others stay
    /// as they are: a counter is no weight. On a device without memory for all, the last tensors
    /// stay on the host if `how` allows it.
    ///
    /// # Errors
    /// As [`Tensor::to_with`].
    #[track_caller]
    pub fn move_with_blocking(
        &mut self,
        place: impl TryInto<Place, Error: Into<Error>>,
        how: To,
        mut progress: impl FnMut(&Progress<'_>),
    ) -> Result<(), Error> {
        let place = Place::named(place)?;
        // Dropped in reverse order, as they nest.
        let _from = self.called_here();
        let _to = place.called_here();
        let Moving { mut outgoing, which, .. } = self.begin(&place, &how)?;
        let (mut moved, mut all) = (Vec::new(), Vec::with_capacity(which.len()));
        let (mut bytes_done, bytes_total) = (0, self.bytes());
        for ((name, tensor), at) in self.iter().zip(which) {
            if at == moved.len() {
                match outgoing.wait_oldest() {
                    Ok(tensor) => moved.extend(tensor),
                    Err(error) => {
                        outgoing.abandon();
                        return Err(error);
                    }
                }
            }
            all.extend(moved.get(at).cloned());
            bytes_done = tensor.bytes().saturating_add(bytes_done);
            progress(&Progress { name, bytes_done, bytes_total });
        }
        *self = self.with_tensors(all);
        Ok(())
    }

    /// Begins to move every tensor. After a failure no transfer is in flight when this returns.
    fn begin(&self, place: &Place, how: &To) -> Result<Moving, Error> {
        let mut moving = Moving::default();
        let added = self.iter().try_for_each(|(_, tensor)| moving.add(tensor, place, how));
        if let Err(error) = added.and_then(|()| moving.outgoing.send_batch()) {
            moving.outgoing.abandon();
            return Err(error);
        }
        Ok(moving)
    }
}

/// A set that is moving.
#[derive(Default)]
struct Moving {
    outgoing: Outgoing,
    /// The transfers of tied tensors, by identity. The set keeps the memory alive, so identities
    /// stay unique.
    tied: HashMap<Tie, usize>,
    /// The index of each parameter's transfer.
    which: Vec<usize>,
}

impl Moving {
    fn add(&mut self, tensor: &Tensor, place: &Place, how: &To) -> Result<(), Error> {
        let at = *self.tied.entry(tensor.tie()).or_insert(self.outgoing.len());
        self.which.push(at);
        if at < self.outgoing.len() {
            return Ok(());
        }
        let dtype = how.dtype.filter(|dtype| dtype.is_float() == tensor.dtype().is_float());
        let dtype = dtype.unwrap_or(tensor.dtype());
        if let Place::Device(transfer) = place
            && is_small(tensor, dtype)
            && !how.or_host
        {
            let (elements, layout) = tensor.elements_as(dtype)?;
            return self.outgoing.push_small(transfer, how.stream.as_ref(), &elements, (dtype, layout));
        }
        self.outgoing.push(tensor.to_with(place, how.clone().dtype(dtype))?);
        Ok(())
    }
}

/// Whether a tensor is sent together with others: one on the host of few bytes, before and after
/// conversion.
fn is_small(tensor: &Tensor, dtype: DType) -> bool {
    let largest = tensor.bytes().max((tensor.len() as u64).saturating_mul(dtype.bytes()));
    tensor.place().is_host() && largest <= SMALL_TENSOR_BYTES
}
