//! The host as a fallback for a device without memory, if the caller allows it.

use aquifer_device::RequestError;

use super::*;
use crate::transfer::{Pending, TransferError};

/// Out of memory is an error unless the caller allows the host, and the tensor's place reports it.
#[test]
fn the_host_is_the_fallback_only_if_the_caller_allows_it() {
    let stand = stand_with(SimConfig::parse("64MiB").unwrap());
    let host = Tensor::zeros(&[32 << 20], DType::F32, Place::Host).unwrap();
    let error = host.to(&stand.transfer).unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
    let to = To::new().dtype(DType::BF16).or_host();
    let here = Tensor::zeros(&[64 << 20], DType::F32, Place::Host)
        .unwrap()
        .to_with(&stand.transfer, to)
        .unwrap()
        .wait()
        .unwrap();
    assert!(here.place().is_host() && here.dtype() == DType::BF16);
    // Other errors are never hidden.
    let to = To::new().or_host().stream(stand_with(SimConfig::default()).device.default_stream());
    assert!(matches!(host.to_with(&stand.transfer, to), Err(Error::Request(RequestError::WrongDevice { .. }))));
}

/// The device runs out of memory when it converts the elements, after the copy.
#[test]
fn the_host_is_the_fallback_for_conversions_without_memory() {
    let stand = stand_with(SimConfig::parse("8MiB").unwrap());
    let host = Tensor::full(&[1 << 20], f16::ONE, Place::Host).unwrap();
    let to = To::new().dtype(DType::F64);
    assert!(host.to_with(&stand.transfer, to.clone()).and_then(Pending::wait).unwrap_err().is_out_of_memory());
    let here = host.to_with(&stand.transfer, to.or_host()).unwrap().wait().unwrap();
    assert!(here.place().is_host() && here.dtype() == DType::F64);
}

/// The device has enough memory.
#[test]
fn lack_of_page_locked_memory_is_an_error_despite_the_fallback() {
    let stand = stand();
    stand.transfer.pinned().set_limit(Some(4096));
    let host = counting(&[1 << 20]);
    let sent = host.to_with(&stand.transfer, To::new().or_host()).and_then(Pending::wait);
    assert!(matches!(sent, Err(Error::Transfer(TransferError::OutOfPinned { .. }))), "{sent:?}");
}
