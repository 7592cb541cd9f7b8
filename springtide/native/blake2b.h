/* BLAKE2b (RFC 7693) of one message that is all there, with a digest and a salt of 16 bytes and no key. */
#pragma once
#include <stddef.h>
#include <stdint.h>

enum { DIGEST_BYTES = 16, SALT_BYTES = 16 };

void blake2b_salted(uint8_t digest[DIGEST_BYTES], const uint8_t salt[SALT_BYTES], const uint8_t *message, size_t length);
