//! Transfers in flight, as values that arrive later.

use std::fmt;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::pin::Pin;
use std::task::{Context, Poll};

use aquifer_device::Stream;
use aquifer_transfer::{Arrival, Completion, TransferError};

use crate::error::Error;

/// A transfer in flight, which yields a value when it is complete.
///
/// Wait for it ([`Pending::wait`]), query it ([`Pending::is_done`]), await it in any executor, or
/// chain it to a stream without waiting for the device ([`Pending::then`]). If it is dropped, the
/// transfer goes on, and the memory that it uses stays until it is done. If an upload fails then,
/// the next access to its memory returns the error
/// ([`AllocError::NotWritten`](crate::memory::AllocError::NotWritten)).
///
/// ```
/// use aquifer::prelude::*;
/// let device = aquifer::open("sim:24GiB")?;
/// let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
///
/// let mut buffer = memory.alloc::<f32>(3, &stream)?;
/// let pending = buffer.upload(vec![1.0, 2.0, 3.0], &stream)?; // returns at once
/// pending.wait()?;
/// let back = pollster::block_on(buffer.download(vec![0.0; 3], &stream)?)?;
/// assert_eq!(back, [1.0, 2.0, 3.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Pending<T> {
    completion: Completion,
    value: Value<T>,
}

/// The value of a transfer.
enum Value<T> {
    Here(T),
    Later(Box<dyn FnOnce() -> Result<T, Error> + Send>),
    Taken,
}

// The closure is called once, and what it was called for is `Taken` after a panic.
impl<T: UnwindSafe> UnwindSafe for Value<T> {}
impl<T: RefUnwindSafe> RefUnwindSafe for Value<T> {}

impl<T> Value<T> {
    fn take(&mut self) -> Result<T, Error> {
        match std::mem::replace(self, Value::Taken) {
            Value::Here(value) => Ok(value),
            Value::Later(make) => make(),
            Value::Taken => Err(TransferError::AlreadyTaken.into()),
        }
    }
}

impl<T> Pending<T> {
    /// A transfer that is complete already.
    pub(crate) fn ready(value: T) -> Pending<T> {
        Pending::new(Completion::complete(), value)
    }

    /// A transfer with a value that is there already.
    pub(crate) fn new(completion: Completion, value: T) -> Pending<T> {
        Pending { completion, value: Value::Here(value) }
    }

    /// A transfer with a value that is made when it is taken.
    pub(crate) fn arriving((completion, value): (Completion, Arrival<T>)) -> Pending<T>
    where
        T: 'static,
    {
        Pending { completion, value: Value::Later(Box::new(move || Ok(value()?))) }
    }

    /// Waits on the host until the transfer is complete. Counted as a synchronisation if it was
    /// not.
    ///
    /// # Errors
    /// Errors of the transfer and of the driver, such as a lost device.
    pub fn wait(mut self) -> Result<T, Error> {
        self.completion.wait()?;
        self.value.take()
    }

    /// As [`Pending::wait`], always counted as a synchronisation: for calls that begin a transfer
    /// only to wait for it.
    pub(crate) fn wait_counted(mut self) -> Result<T, Error> {
        self.completion.wait_counted()?;
        self.value.take()
    }

    /// Whether the transfer is complete or has failed, so that [`Pending::wait`] would not wait.
    /// Queries the driver.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn is_done(&self) -> Result<bool, Error> {
        Ok(self.completion.is_done()?)
    }

    /// Whether all of it is enqueued: no thread works on it any more.
    pub(crate) fn is_enqueued(&self) -> bool {
        self.completion.is_enqueued()
    }

    /// Continues with the transfer's value as soon as the transfer is enqueued: orders later work
    /// of `stream` after it, without waiting for the device, and calls `next`. Waits on the host
    /// only while threads are still enqueuing.
    ///
    /// Device memory in the value is ready on `stream` ([`OnStreams::ready_on`]): any work of
    /// `stream` may use it, and it may be dropped at any time. The host should not read the value
    /// in `next`, because it would have to wait; pinned memory waits by itself when it is
    /// read.
    ///
    /// # Errors
    /// Errors of the transfer so far, and of the driver. The transfer goes on.
    pub fn then<R>(self, stream: &Stream, next: impl FnOnce(&Stream, T) -> R) -> Result<R, Error>
    where
        T: OnStreams,
    {
        let value = self.enqueued_for(stream)?;
        value.ready_on(stream)?;
        Ok(next(stream, value))
    }

    /// Orders later work of `stream` after the transfer, and returns its value.
    pub(crate) fn enqueued_for(mut self, stream: &Stream) -> Result<T, Error> {
        self.completion.order(stream)?;
        self.value.take()
    }

    /// Converts the transfer's value when it is taken.
    pub fn map<R>(self, change: impl FnOnce(T) -> R + Send + 'static) -> Pending<R>
    where
        T: Send + 'static,
    {
        self.and_then(move |value| Ok(change(value)))
    }

    /// Converts the transfer's value when it is taken; the conversion may fail.
    pub(crate) fn and_then<R>(self, change: impl FnOnce(T) -> Result<R, Error> + Send + 'static) -> Pending<R>
    where
        T: Send + 'static,
    {
        self.make(move |mut value| value.take().and_then(change))
    }

    /// Makes the value in another way if taking it fails.
    pub(crate) fn or_else(self, recover: impl FnOnce(Error) -> Result<T, Error> + Send + 'static) -> Pending<T>
    where
        T: Send + 'static,
    {
        match self.value {
            Value::Later(_) => self.make(move |mut value| value.take().or_else(recover)),
            Value::Here(_) | Value::Taken => self,
        }
    }

    /// Makes another value when this one is taken.
    fn make<R>(self, make: impl FnOnce(Value<T>) -> Result<R, Error> + Send + 'static) -> Pending<R>
    where
        T: Send + 'static,
    {
        let Pending { completion, value } = self;
        Pending { completion, value: Value::Later(Box::new(move || make(value))) }
    }

    /// The values of two transfers, when both are complete.
    pub fn join<U>(self, other: Pending<U>) -> Pending<(T, U)>
    where
        T: Send + 'static,
        U: Send + 'static,
    {
        let (mut own, mut others) = (self.value, other.value);
        let value = Value::Later(Box::new(move || Ok((own.take()?, others.take()?))));
        Pending { completion: self.completion.join(other.completion), value }
    }

    /// The values of all transfers, in order, when all are complete.
    pub fn all(pendings: impl IntoIterator<Item = Pending<T>>) -> Pending<Vec<T>>
    where
        T: Send + 'static,
    {
        let (mut all, mut values) = (Completion::complete(), Vec::new());
        for Pending { completion, value } in pendings {
            all = if values.is_empty() { completion } else { all.join(completion) };
            values.push(value);
        }
        let make = move || values.into_iter().map(|mut value| value.take()).collect();
        Pending { completion: all, value: Value::Later(Box::new(make)) }
    }

    /// Another value that is complete when this one is.
    pub(crate) fn with<R>(&self, value: R) -> Pending<R> {
        Pending::new(self.completion.clone(), value)
    }

    /// Cancels the transfer: threads of the runtime begin no more of it, and enqueued work goes on.
    /// Drops the value.
    pub fn cancel(self) {
        self.completion.cancel();
    }

    /// Cancels the transfer and waits until no thread works on it any more.
    pub(crate) fn abandon(self) {
        self.completion.abandon();
    }
}

/// A value that streams can use before its transfer is complete: device memory, and types made of
/// it.
pub trait OnStreams {
    /// Makes each piece of device memory in the value ready on `stream`, as
    /// [`aquifer_allocator::Storage::ready_on`] does: work of `stream` may use it without access
    /// guards, and it may be dropped at any time. A struct calls this for each of its fields.
    ///
    /// # Errors
    /// As [`aquifer_allocator::Storage::ready_on`].
    fn ready_on(&self, stream: &Stream) -> Result<(), Error>;
}

impl OnStreams for () {
    fn ready_on(&self, _stream: &Stream) -> Result<(), Error> {
        Ok(())
    }
}

impl<T: OnStreams> OnStreams for Vec<T> {
    fn ready_on(&self, stream: &Stream) -> Result<(), Error> {
        self.iter().try_for_each(|value| value.ready_on(stream))
    }
}

impl<T: OnStreams> OnStreams for Option<T> {
    fn ready_on(&self, stream: &Stream) -> Result<(), Error> {
        self.iter().try_for_each(|value| value.ready_on(stream))
    }
}

impl<T: OnStreams, U: OnStreams> OnStreams for (T, U) {
    fn ready_on(&self, stream: &Stream) -> Result<(), Error> {
        self.0.ready_on(stream)?;
        self.1.ready_on(stream)
    }
}

impl<T: OnStreams, U: OnStreams, V: OnStreams> OnStreams for (T, U, V) {
    fn ready_on(&self, stream: &Stream) -> Result<(), Error> {
        self.0.ready_on(stream)?;
        self.1.ready_on(stream)?;
        self.2.ready_on(stream)
    }
}

/// A thread of the runtime that sleeps until the device is done wakes the task; nothing polls.
impl<T> Future for Pending<T> {
    type Output = Result<T, Error>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let pending = self.get_mut();
        match pending.completion.poll(context) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(Ok(())) => Poll::Ready(pending.value.take()),
            Poll::Ready(Err(error)) => Poll::Ready(Err(error.into())),
        }
    }
}

/// Polling pins no field.
impl<T> Unpin for Pending<T> {}

impl<T> fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pending").field("completion", &self.completion).finish_non_exhaustive()
    }
}
