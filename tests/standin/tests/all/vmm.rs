//! Physical memory mapped at reserved addresses.

use cudarc::driver::sys::{
    CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationGranularity_flags as Granularity, CUmemAllocationProp,
    CUmemAllocationType, CUmemLocation, CUmemLocationType, CUpointer_attribute as PtrAttr,
};

use crate::support::{Card, MIB, call};

const GRANULE: usize = 2 * MIB;

fn location(ordinal: i32) -> CUmemLocation {
    CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: ordinal }
}

fn properties(ordinal: i32) -> CUmemAllocationProp {
    // SAFETY: a structure of C for which zeros are the defaults.
    let mut properties: CUmemAllocationProp = unsafe { std::mem::zeroed() };
    properties.type_ = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = location(ordinal);
    properties
}

fn access(ordinal: i32) -> CUmemAccessDesc {
    CUmemAccessDesc { location: location(ordinal), flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE }
}

fn reserve(bytes: usize) -> u64 {
    let mut ptr = 0;
    assert_eq!(call!(cuMemAddressReserve(&mut ptr, bytes, 0, 0, 0)), 0);
    ptr
}

fn create(card: &Card) -> u64 {
    let mut physical = 0;
    assert_eq!(call!(cuMemCreate(&mut physical, GRANULE, &properties(card.handle()), 0)), 0);
    physical
}

#[test]
fn access_to_mapped_memory_is_granted() {
    let card = Card::new();
    let mut granularity = 0;
    let minimum = Granularity::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
    assert_eq!(call!(cuMemGetAllocationGranularity(&mut granularity, &properties(card.handle()), minimum)), 0);
    assert_eq!(granularity, GRANULE);
    let (ptr, physical) = (reserve(4 * GRANULE), create(&card));
    let at = ptr + GRANULE as u64;
    assert_eq!(call!(cuMemMap(at, GRANULE, 0, physical, 0)), 0);
    let allowed = || {
        let mut flags = 9;
        assert_eq!(call!(cuMemGetAccess(&mut flags, &mut location(card.handle()), at)), 0);
        flags
    };
    assert_eq!(allowed(), 0);
    assert_eq!(call!(cuMemSetAccess(at, GRANULE, &access(card.handle()), 1)), 0);
    assert_eq!(allowed(), 3);
    let mapped = card.device.mapping_at(at + 5).unwrap();
    assert_eq!((mapped.ptr, mapped.bytes, mapped.devices), (at, GRANULE as u64, 1 << card.device.ordinal()));
    assert_eq!(call!(cuMemRelease(physical)), 0, "the mapping keeps the memory");
    assert_eq!([call!(cuMemUnmap(at, GRANULE)), call!(cuMemAddressFree(ptr, 4 * GRANULE))], [0, 0]);
    assert_eq!(card.context.mem_get_info().unwrap().0, 1 << 30);
    assert_eq!(card.device.mapping_at(at), None);
    card.assert_no_violation();
}

#[test]
fn rules_of_mapping_are_enforced() {
    let card = Card::new();
    let (ptr, physical) = (reserve(2 * GRANULE), create(&card));
    assert_eq!(call!(cuMemMap(ptr, GRANULE, 4096, physical, 0)), 1, "a part of a handle");
    assert_eq!(call!(cuMemMap(ptr + 4096, GRANULE, 0, physical, 0)), 1, "between granules");
    assert_eq!(call!(cuMemMap(4096, GRANULE, 0, physical, 0)), 1, "outside of a reservation");
    assert_eq!(call!(cuMemMap(ptr, GRANULE, 0, physical, 0)), 0);
    assert_eq!(call!(cuMemMap(ptr, GRANULE, 0, physical, 0)), 1, "over another mapping");
    assert_eq!(call!(cuMemMap(ptr + GRANULE as u64, GRANULE, 0, physical, 0)), 0, "at a second address");
    assert_eq!(call!(cuMemUnmap(ptr + GRANULE as u64, GRANULE)), 0);
    assert_eq!(call!(cuMemUnmap(ptr, GRANULE / 2)), 1, "half a mapping");
    assert_eq!(call!(cuMemAddressFree(ptr, 2 * GRANULE)), 1, "with a mapping in it");
    assert_eq!(call!(cuMemSetAccess(ptr, GRANULE, &access(4095), 1)), 101);
    assert_eq!(call!(cuMemSetAccess(ptr, GRANULE, &access(card.handle()), 0)), 1);
    let mut read_only = access(card.handle());
    read_only.flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ;
    assert_eq!(call!(cuMemSetAccess(ptr, GRANULE, &read_only, 1)), 801);
    assert_eq!([call!(cuMemRelease(physical)), call!(cuMemRelease(physical))], [0, 400]);
}

#[test]
fn properties_are_checked() {
    let card = Card::new();
    let other = Card::new();
    card.context.bind_to_thread().unwrap();
    let mut physical = 0;
    let mut make = |properties: &CUmemAllocationProp| call!(cuMemCreate(&mut physical, GRANULE, properties, 0));
    assert_eq!(make(&properties(other.handle())), 101, "memory of another device");
    let mut odd = properties(card.handle());
    odd.allocFlags.compressionType = 1;
    assert_eq!(make(&odd), 801);
    let mut shared = properties(card.handle());
    shared.allocFlags.gpuDirectRDMACapable = 1;
    assert_eq!(make(&shared), 0);
    let no_type = CUmemAllocationProp { type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_INVALID, ..odd };
    assert_eq!(make(&no_type), 1);
    assert_eq!(call!(cuMemCreate(&mut physical, GRANULE + 1, &properties(card.handle()), 0)), 1);
    assert_eq!(call!(cuMemCreate(&mut physical, GRANULE, std::ptr::null(), 0)), 1);
    assert_eq!(call!(cuMemAddressReserve(&mut physical, GRANULE, 3, 0, 0)), 1, "an alignment is a power of two");
}

#[test]
fn addresses_are_part_of_their_reservation_and_known_to_every_device() {
    let (other, card) = (Card::new(), Card::new());
    let fact = |attribute, ptr: u64| {
        let mut value = 0_u64;
        let answer = call!(cuPointerGetAttribute((&raw mut value).cast(), attribute, ptr));
        (answer, value)
    };
    let (start, memory) = (reserve(4 * GRANULE), create(&card));
    assert_eq!(call!(cuMemMap(start, GRANULE, 0, memory, 0)), 0);
    let (reserved, mapped, unmapped) = ((0, 4 * GRANULE as u64), start + 4096, start + GRANULE as u64);
    for inside in [mapped, unmapped] {
        assert_eq!(fact(PtrAttr::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, inside), (0, 2));
        assert_eq!(fact(PtrAttr::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, inside), (0, start));
        assert_eq!(fact(PtrAttr::CU_POINTER_ATTRIBUTE_RANGE_SIZE, inside), reserved);
    }
    let is_mapped = |ptr| fact(PtrAttr::CU_POINTER_ATTRIBUTE_MAPPED, ptr);
    assert_eq!([is_mapped(mapped), is_mapped(unmapped)], [(0, 1), (0, 0)]);
    let (mut from, mut bytes) = (0, 0);
    assert_eq!(call!(cuMemGetAddressRange_v2(&mut from, &mut bytes, mapped)), 0);
    assert_eq!((from, bytes), (start, GRANULE));
    assert_eq!(call!(cuMemGetAddressRange_v2(&mut from, &mut bytes, unmapped)), 500);
    // Whichever device is asked.
    other.context.bind_to_thread().unwrap();
    assert_eq!(fact(PtrAttr::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, mapped), (0, 2));
    assert_eq!(fact(PtrAttr::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, mapped), (0, card.device.ordinal().into()));
    assert_eq!(fact(PtrAttr::CU_POINTER_ATTRIBUTE_CONTEXT, mapped), (0, card.context.cu_ctx() as u64));
    assert_eq!(fact(PtrAttr::CU_POINTER_ATTRIBUTE_DEVICE_POINTER, mapped).0, 1, "its kernels cannot reach that");
}
