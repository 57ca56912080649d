/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Hold many idle connections to a server on loopback (scripts/vm/job-idle.sh).
 *
 *   hold PORT COUNT each|together SENT EXPECTED
 *
 * Opens COUNT connections and on each, one after the other or on all at once, sends the bytes of the file SENT
 * and reads until EXPECTED's bytes have come. Prints `held COUNT`, and ends when its standard input does.
 * Addresses 127.0.0.2 and up are the clients', 20,000 connections each, so that ports suffice.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#define PER_ADDRESS 20000
#define BYTES 65536

struct bytes {
	char at[BYTES];
	size_t len;
};

static void fail(const char *what, int number)
{
	fprintf(stderr, "hold: connection %d: %s: %s\n", number, what, strerror(errno));
	exit(2);
}

static struct bytes read_file(const char *path)
{
	static const struct bytes none;
	struct bytes b = none;
	FILE *file = fopen(path, "r");

	if (!file)
		fail(path, 0);
	b.len = fread(b.at, 1, BYTES, file);
	fclose(file);
	return b;
}

static int open_one(int port, int number)
{
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(port),
		.sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	struct sockaddr_in from = { .sin_family = AF_INET,
		.sin_addr.s_addr = htonl(INADDR_LOOPBACK + 1 + number / PER_ADDRESS) };
	struct timeval limit = { .tv_sec = 60 };
	int one = 1, s = socket(AF_INET, SOCK_STREAM, 0);

	if (s < 0)
		fail("socket", number);
	setsockopt(s, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &one, sizeof(one));
	setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
	if (bind(s, (struct sockaddr *)&from, sizeof(from)) || connect(s, (struct sockaddr *)&to, sizeof(to)))
		fail("connect", number);
	return s;
}

static void put(int s, int number, const struct bytes *sent)
{
	if (sent->len && send(s, sent->at, sent->len, MSG_NOSIGNAL) != (ssize_t)sent->len)
		fail("send", number);
}

static void await(int s, int number, const struct bytes *expected)
{
	static char got[BYTES];
	size_t len = 0;

	while (!memmem(got, len, expected->at, expected->len)) {
		ssize_t n = recv(s, got + len, BYTES - len, 0);

		if (n <= 0)
			fail(n ? "receive" : "closed by the server, or an answer too long", number);
		len += n;
	}
}

int main(int argc, char **argv)
{
	if (argc != 6) {
		fprintf(stderr, "hold: see the head of scripts/vm/hold.c\n");
		return 2;
	}
	int port = atoi(argv[1]), count = atoi(argv[2]);
	bool together = !strcmp(argv[3], "together");
	struct bytes sent = read_file(argv[4]), expected = read_file(argv[5]);
	int *sockets = calloc(count, sizeof(*sockets));

	if (!sockets)
		fail("memory", 0);
	for (int i = 0; i < count; i++) {
		sockets[i] = open_one(port, i);
		if (!together) {
			put(sockets[i], i, &sent);
			await(sockets[i], i, &expected);
		}
	}
	for (int i = 0; together && i < count; i++)
		put(sockets[i], i, &sent);
	for (int i = 0; together && i < count; i++)
		await(sockets[i], i, &expected);
	printf("held %d\n", count);
	fflush(stdout);
	while (getchar() != EOF)
		;
	return 0;
}
